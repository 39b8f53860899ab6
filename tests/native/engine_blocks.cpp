// Blocks: layouts that cannot be, and what is made of those that can.
#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/block_layout.h"
#include "engine/pieces.h"

namespace aioflagcx::engine {
namespace {

constexpr std::uint64_t kMost = std::numeric_limits<std::uint64_t>::max();

BlockSpan span(std::uint64_t length, std::uint64_t src_stride, std::uint64_t dst_stride,
               std::uint64_t repeats = 1, std::uint64_t src_step = 0, std::uint64_t dst_step = 0) {
    return {1000, 500'000, length, src_stride, dst_stride, repeats, src_step, dst_step};
}

std::string refusal(const BlockSpan& bad, std::uint64_t blocks = 4) {
    try {
        BlockLayout({span(1, 1, 1), bad}, blocks, blocks);
    } catch (const std::invalid_argument& error) {
        return error.what();
    }
    return "";
}

std::vector<Piece> all(const Pieces& pieces) {
    std::vector<Piece> found;
    for (std::size_t i = 0; i < pieces.size(); ++i) found.push_back(pieces[i]);
    return found;
}

TEST(BlockLayout, NamesTheSpanThatCannotBe) {
    EXPECT_EQ(refusal(span(0, 1, 1)), "spans[1] has a length of 0");
    EXPECT_EQ(refusal(span(1, 1, 1, 0)), "spans[1] has 0 repeats");
    EXPECT_EQ(refusal(span(8, 8, 7)), "spans[1] has a dst_stride of 7 bytes for blocks of 8");
    EXPECT_EQ(refusal(span(8, 23, 24, 3, 8, 8)),
              "spans[1] has a src_stride of 23 bytes for blocks of 24");
    EXPECT_EQ(refusal(span(8, 24, 24, 3, 8, 7)),
              "spans[1] has a dst_step of 7 bytes for pieces of 8");
}

TEST(BlockLayout, NeverWrapsAround) {
    EXPECT_EQ(refusal(span(kMost, kMost, kMost), 1), "spans[1] is larger than 2**63 bytes");
    EXPECT_EQ(refusal(span(8, 8, 8, kMost, kMost, 8)), "spans[1] is larger than 2**63 bytes");
    EXPECT_NE(refusal(span(8, kMost, 8)).find("reaches over 2**63: src"), std::string::npos);
    EXPECT_NE(refusal(span(8, 8, 1ull << 62)).find("reaches over 2**63: dst"), std::string::npos);
    BlockSpan high = span(8, 8, 8);
    high.src = kMost;
    EXPECT_NE(refusal(high).find("reaches over 2**63: src"), std::string::npos);
    const BlockSpan huge{0, 0, 1ull << 62, 1ull << 62, 1ull << 62};
    EXPECT_THROW(BlockLayout({huge, huge, huge}, 1, 1), std::invalid_argument);
}

TEST(BlockLayout, StridesOfSingleBlocksDoNotMatter) {
    EXPECT_EQ(refusal(span(8, 0, 0), 1), "");
    EXPECT_THROW(BlockLayout({}, 0, 1), std::invalid_argument);
}

TEST(Pieces, RunsOfDenseBlocksAreMerged) {
    const auto layout = std::make_shared<const BlockLayout>(
        std::vector{span(16, 16, 16), span(16, 32, 16), span(8, 16, 16, 2, 8, 8)}, 100, 100);
    auto ids = std::make_shared<BlockIds>();
    for (const auto& [src, dst] : {std::pair{7, 3}, {8, 4}, {9, 5}, {10, 7}, {12, 8}}) {
        ids->add(src, dst);
    }
    std::vector<BlockRow> rows;
    for (const BlockSpan& one : layout->spans()) rows.push_back({&one, layout, ids});
    const Pieces pieces(std::move(rows));
    ASSERT_EQ(pieces.size(), 3u + 5u + 3u);
    const auto found = all(pieces);
    EXPECT_EQ(found[0].local, 1000u + 7 * 16);
    EXPECT_EQ(found[0].remote, 500'000u + 3 * 16);
    EXPECT_EQ(found[0].length, 48u);
    EXPECT_EQ(found[1].length, 16u);
    EXPECT_EQ(found[2].local, 1000u + 12 * 16);
    // Consecutive blocks that do not touch each other here.
    EXPECT_EQ(found[3].length, 16u);
    EXPECT_EQ(found[4].local, 1000u + 8 * 32);
    EXPECT_EQ(found[4].remote, 500'000u + 4 * 16);
    // Two pieces that touch each other on both sides are one from the beginning.
    EXPECT_EQ(found[8].length, 48u);
}

TEST(Pieces, RepeatsOfABlockComeOneAfterAnother) {
    const auto layout =
        std::make_shared<const BlockLayout>(std::vector{span(8, 100, 50, 3, 32, 16)}, 10, 10);
    auto ids = std::make_shared<BlockIds>();
    ids->add(2, 9);
    ids->add(3, 0);
    std::vector<BlockRow> rows{{&layout->spans()[0], layout, ids}};
    const Pieces pieces(std::move(rows));
    const auto found = all(pieces);
    ASSERT_EQ(found.size(), 6u);
    for (std::size_t i = 0; i < 6; ++i) {
        const std::uint64_t src = i < 3 ? 2 : 3, dst = i < 3 ? 9 : 0;
        EXPECT_EQ(found[i].local, 1000 + src * 100 + i % 3 * 32);
        EXPECT_EQ(found[i].remote, 500'000 + dst * 50 + i % 3 * 16);
        EXPECT_EQ(found[i].length, 8u);
    }
}

}  // namespace
}  // namespace aioflagcx::engine
