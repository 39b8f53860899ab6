#include <gtest/gtest.h>

#include <random>

#include "engine/address_index.h"

namespace aioflagcx::engine {
namespace {

TEST(AddressIndex, FindsNothingWhenEmpty) {
    EXPECT_EQ(AddressIndex().find(10, 1, 0), AddressIndex::kNone);
}

TEST(AddressIndex, HoldsRegionEdgesAndNothingBeyond) {
    const AddressIndex index({{100, 50, 0}});
    EXPECT_EQ(index.find(100, 50, 0), 0u);
    EXPECT_EQ(index.find(149, 1, 0), 0u);
    EXPECT_EQ(index.find(149, 2, 0), AddressIndex::kNone);
    EXPECT_EQ(index.find(99, 1, 0), AddressIndex::kNone);
    EXPECT_EQ(index.find(150, 1, 0), AddressIndex::kNone);
}

TEST(AddressIndex, ReachesTheEndOfTheAddressSpace) {
    const AddressIndex index({{UINT64_MAX - 9, 10, 0}});
    EXPECT_EQ(index.find(UINT64_MAX, 1, 0), 0u);
    EXPECT_EQ(index.find(UINT64_MAX, 2, 0), AddressIndex::kNone);
}

TEST(AddressIndex, OfOverlappingRangesTakesTheSmallestThatGrantsTheAccess) {
    const AddressIndex index({{0, 1000, 3}, {100, 100, 1}, {120, 10, 2}});
    EXPECT_EQ(index.find(125, 2, 0), 2u);
    EXPECT_EQ(index.find(125, 2, 1), 1u);
    EXPECT_EQ(index.find(125, 2, 3), 0u);
    EXPECT_EQ(index.find(128, 5, 1), 1u);
}

TEST(AddressIndex, AHintNeverChangesTheAnswer) {
    std::mt19937_64 random(7);
    for (int round = 0; round < 200; ++round) {
        std::vector<AddressRange> ranges(random() % 40);
        for (AddressRange& range : ranges) {
            range = {random() % 500, 1 + random() % 120, static_cast<std::uint32_t>(random() % 4)};
        }
        const AddressIndex index(ranges);
        std::size_t hint = AddressIndex::kNone;
        for (int probe = 0; probe < 200; ++probe) {
            const std::uint64_t addr = random() % 600;
            const std::uint64_t length = 1 + random() % 60;
            const auto access = static_cast<std::uint32_t>(random() % 4);
            std::uint64_t best = UINT64_MAX;
            for (const AddressRange& r : ranges) {
                if (addr >= r.addr && addr + length <= r.addr + r.size &&
                    (r.access & access) == access) {
                    best = std::min(best, r.size);
                }
            }
            const std::size_t found = index.find(addr, length, access, hint);
            if (best == UINT64_MAX) {
                ASSERT_EQ(found, AddressIndex::kNone);
            } else {
                ASSERT_NE(found, AddressIndex::kNone);
                ASSERT_EQ(ranges[found].size, best);
                ASSERT_LE(ranges[found].addr, addr);
                ASSERT_GE(ranges[found].addr + ranges[found].size, addr + length);
            }
            hint = found;
        }
    }
}

}  // namespace
}  // namespace aioflagcx::engine
