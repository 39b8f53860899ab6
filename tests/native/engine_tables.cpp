#include <gtest/gtest.h>

#include <barrier>
#include <cerrno>
#include <future>
#include <random>
#include <thread>

#include "common/error.h"
#include "engine/local_table.h"
#include "engine/remote_table.h"
#include "fake_device.h"

namespace aioflagcx::engine {
namespace {

using namespace std::chrono_literals;
using testing::FakePd;
using testing::Script;

std::span<const std::uint8_t> bytes_of(const std::string& text) {
    return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

struct Tables : ::testing::Test {
    FakePd pd{std::make_shared<Script>()};
    FakePd second{std::make_shared<Script>()};
    LocalTable local{{&pd, &second}, 1000};

    RemoteTable remote() { return RemoteTable(decode_table(bytes_of(local.since(0).table))); }
    std::vector<std::uint64_t> add(std::vector<RegionSpec> specs) { return local.add(specs); }
};

TEST_F(Tables, ATableReadsBackAsWritten) {
    add({{4096, 100, kTableAccessRead, true, "kv"}, {8192, 2500, kTableAccessWrite, true, {}}});
    const RemoteTable table = remote();
    ASSERT_EQ(table.data().records.size(), 2u);
    EXPECT_EQ(table.data().devices, 2u);
    const TableRecord* kv = table.find_name("kv");
    ASSERT_NE(kv, nullptr);
    EXPECT_EQ(kv->addr, 4096u);
    EXPECT_EQ(kv->access, kTableAccessRead);
    EXPECT_EQ(table.find_name("other"), nullptr);
}

TEST_F(Tables, ARegionLongerThanAnMrHasOneKeyPerDeviceAndChunk) {
    add({{8192, 2500, kTableAccessWrite, true, {}}});
    const RemoteTable table = remote();
    const TableRecord& record = table.record(0);
    EXPECT_EQ(record.chunks(), 3u);
    EXPECT_EQ(table.data().keys.size(), 6u);
    std::vector<std::uint32_t> keys;
    for (std::uint32_t device = 0; device < 2; ++device) {
        for (std::uint64_t chunk = 0; chunk < 3; ++chunk) {
            keys.push_back(table.rkey(record, device, chunk));
        }
    }
    EXPECT_EQ(keys, (std::vector<std::uint32_t>{1001, 1003, 1005, 1001, 1003, 1005}));
}

// A device at which registration waits for the other's.
class MeetingPd final : public verbs::ProtectionDomain {
  public:
    MeetingPd(std::barrier<>& meeting, bool fails) : meeting_(meeting), fails_(fails) {}
    std::unique_ptr<verbs::MemoryRegion> register_memory(std::uint64_t, std::uint64_t,
                                                         std::uint32_t,
                                                         const verbs::SharedMemory&) override {
        meeting_.arrive_and_wait();
        if (fails_) throw NativeError("register", ENOMEM, "as the test says");
        return std::make_unique<testing::FakeMr>(1, false);
    }
    std::unique_ptr<verbs::QueuePair> create_qp(const verbs::QpInit&) override { return nullptr; }

  private:
    std::barrier<>& meeting_;
    bool fails_;
};

TEST(ParallelRegistration, TheDevicesRegisterMuchMemoryAtTheSameTime) {
    std::barrier meeting(3);
    MeetingPd pds[3] = {{meeting, false}, {meeting, false}, {meeting, false}};
    LocalTable local{{&pds[0], &pds[1], &pds[2]}, UINT64_MAX};
    local.add(std::vector<RegionSpec>{{4096, 1ull << 30, kTableAccessWrite, true, {}}});
    EXPECT_EQ(local.size(), 1u);
}

TEST(ParallelRegistration, OneDevicesFailureIsThatOfAll) {
    std::barrier meeting(2);
    MeetingPd pds[2] = {{meeting, false}, {meeting, true}};
    LocalTable local{{&pds[0], &pds[1]}, UINT64_MAX};
    try {
        local.add(std::vector<RegionSpec>{{4096, 1ull << 30, kTableAccessWrite, true, {}}});
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_EQ(error.detail(), "as the test says");
    }
    EXPECT_EQ(local.size(), 0u);
}

TEST(TableFlags, AnyDevicesNeedForAReadIsTold) {
    const auto relaxed = std::make_shared<Script>();
    relaxed->relaxed = true;
    FakePd plain{std::make_shared<Script>()};
    FakePd other{relaxed};
    const std::vector<RegionSpec> spec{{4096, 100, kTableAccessWrite, true, {}}};
    LocalTable both{{&plain, &other}, 1000};
    LocalTable none{{&plain}, 1000};
    both.add(spec);
    none.add(spec);
    EXPECT_EQ(decode_table(bytes_of(both.since(0).table)).records[0].flags, kTableReadAfterWrite);
    EXPECT_EQ(decode_table(bytes_of(none.since(0).table)).records[0].flags, 0u);
}

TEST_F(Tables, DeltasGiveTheSameTableAsTheWhole) {
    std::mt19937_64 random(3);
    auto known = std::make_shared<const RemoteTable>(decode_table(bytes_of(local.since(0).table)));
    std::vector<std::uint64_t> live;
    for (int round = 0; round < 100; ++round) {
        for (std::uint64_t n = random() % 4; n > 0; --n) {
            if (!live.empty() && random() % 2 == 0) {
                const std::size_t victim = random() % live.size();
                const std::vector<std::uint64_t> ids{live[victim]};
                live.erase(live.begin() + static_cast<std::ptrdiff_t>(victim));
                local.revoke(ids);
            } else {
                std::optional<std::string> name;
                if (random() % 2 == 0) name = "r" + std::to_string(random());
                live.push_back(
                    add({{random() % 100000 + 1, 1 + random() % 3000, 3, true, name}})[0]);
            }
        }
        const auto changes = local.since(known->data().generation);
        ASSERT_FALSE(changes.full);
        ASSERT_EQ(changes.base, known->data().generation);
        known = known->apply(decode_table(bytes_of(changes.table)),
                             decode_removed(bytes_of(changes.removed)));
        const RemoteTable whole = remote();
        ASSERT_EQ(known->data().records.size(), live.size());
        ASSERT_EQ(whole.data().records.size(), live.size());
        for (const TableRecord& record : whole.data().records) {
            const std::size_t found = known->index().find(record.addr, record.size, 0);
            ASSERT_NE(found, AddressIndex::kNone);
        }
    }
}

TEST_F(Tables, AGenerationOfAnotherLifeGetsTheWhole) {
    add({{4096, 100, 3, true, {}}});
    EXPECT_TRUE(local.since(local.generation() + 1).full);
    EXPECT_TRUE(local.since(0).full);
    EXPECT_FALSE(local.since(local.generation()).full);
}

TEST_F(Tables, BrokenTablesAreRefusedWhole) {
    add({{4096, 100, 3, true, "kv"}, {8192, 2500, 3, true, {}}});
    const std::string good = local.since(0).table;
    for (std::size_t length = 0; length < good.size(); ++length) {
        EXPECT_THROW(decode_table(bytes_of(good.substr(0, length))), std::invalid_argument);
    }
    std::mt19937_64 random(5);
    for (int round = 0; round < 20000; ++round) {
        std::string bad = good;
        for (int flips = 0; flips < 3; ++flips) {
            bad[random() % bad.size()] = static_cast<char>(random());
        }
        try {  // whatever is accepted must be safe to use
            const RemoteTable table(decode_table(bytes_of(bad)));
            for (std::size_t i = 0; i < table.data().records.size(); ++i) {
                const TableRecord& record = table.record(i);
                (void)table.data().name(record);
                for (std::uint32_t device = 0; device < table.data().devices; ++device) {
                    (void)table.rkey(record, device, record.chunks() - 1);
                }
            }
        } catch (const std::invalid_argument&) {
        }
    }
    EXPECT_THROW(decode_removed(bytes_of("1234567")), std::invalid_argument);
}

TEST_F(Tables, RegistrationIsRefusedForImpossibleRanges) {
    EXPECT_THROW(add({{4096, 0, 3, true, {}}}), NativeError);
    EXPECT_THROW(add({{UINT64_MAX, 2, 3, true, {}}}), NativeError);
    EXPECT_EQ(local.size(), 0u);
}

TEST_F(Tables, DeregistrationWaitsForUsersAndRefusesNewOnes) {
    const auto ids = add({{4096, 100, 3, true, {}}});
    const auto region = local.snapshot()->regions[0];
    ASSERT_TRUE(LocalTable::acquire(*region));
    EXPECT_FALSE(local.remove(ids, verbs::Clock::now() + 10ms));
    EXPECT_EQ(local.snapshot()->regions.size(), 0u);
    EXPECT_FALSE(LocalTable::acquire(*region));
    local.release(*region);
    std::thread user([&] { local.release(*region); });
    EXPECT_TRUE(local.remove(ids, verbs::Deadline::max()));
    user.join();
    EXPECT_TRUE(region->mrs.empty());
    EXPECT_TRUE(local.remove(ids, verbs::Clock::now()));  // done stays done
}

// What a hostile peer may send: each must be refused when it comes, not when a slice needs a key.
TEST_F(Tables, RegionsWithoutDevicesAreRefused) {
    TableData data;
    data.records.push_back({1, 4096, 1 << 20, 1, 3, kNoName, 0});
    EXPECT_THROW(decode_table(bytes_of(encode_table(data))), std::invalid_argument);
}

TEST_F(Tables, SharedKeysAndNamesAreRefused) {
    TableData data;
    data.devices = 1;
    data.keys = {7, 8};
    data.records = {{1, 4096, 2, 1, 3, kNoName, 0}, {2, 8192, 2, 1, 3, kNoName, 0}};
    EXPECT_THROW(decode_table(bytes_of(encode_table(data))), std::invalid_argument);
    data.keys = {7, 8, 9, 10};
    data.records[1].key_off = 2;
    EXPECT_NO_THROW(decode_table(bytes_of(encode_table(data))));
    data.records[0].name_off = data.records[1].name_off = data.add_name("both");
    EXPECT_THROW(decode_table(bytes_of(encode_table(data))), std::invalid_argument);
}

// A memory region whose end takes as long as the test likes.
struct SlowMr final : verbs::MemoryRegion {
    explicit SlowMr(std::shared_future<void> until) : end(std::move(until)) {}
    bool revoke(verbs::Deadline deadline) override {
        if (deadline != verbs::Deadline::max()) {
            return end.wait_until(deadline) == std::future_status::ready;
        }
        end.wait();
        return true;
    }
    std::uint32_t lkey() const noexcept override { return 1; }
    std::uint32_t rkey() const noexcept override { return 1; }
    std::shared_future<void> end;
};
struct SlowPd final : verbs::ProtectionDomain {
    explicit SlowPd(std::shared_future<void> until) : end(std::move(until)) {}
    std::unique_ptr<verbs::MemoryRegion> register_memory(std::uint64_t, std::uint64_t,
                                                         std::uint32_t,
                                                         const verbs::SharedMemory&) override {
        return std::make_unique<SlowMr>(end);
    }
    std::unique_ptr<verbs::QueuePair> create_qp(const verbs::QpInit&) override { return nullptr; }
    std::shared_future<void> end;
};

TEST(LocalTable, ASecondDeregistrationWaitsForTheFirst) {
    std::promise<void> end;
    SlowPd pd(end.get_future().share());
    LocalTable table({&pd}, 1000);
    const auto ids = table.add(std::vector<RegionSpec>{{4096, 100, 3, true, {}}});
    auto first =
        std::async(std::launch::async, [&] { return table.remove(ids, verbs::Deadline::max()); });
    while (table.snapshot()->regions.size() != 0) std::this_thread::yield();
    std::this_thread::sleep_for(20ms);
    EXPECT_FALSE(table.remove(ids, verbs::Clock::now() + 20ms));
    end.set_value();
    EXPECT_TRUE(table.remove(ids, verbs::Deadline::max()));
    EXPECT_TRUE(first.get());
}

TEST_F(Tables, ANameThatNoTableCanHoldIsRefused) {
    EXPECT_THROW(add({{4096, 1, 3, true, std::string(65'536, 'x')}}), NativeError);
}

}  // namespace
}  // namespace aioflagcx::engine
