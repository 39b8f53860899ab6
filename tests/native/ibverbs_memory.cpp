// Registration by the ibverbs provider.
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>

#include "common/error.h"
#include "rdma_fixture.h"
#include "verbs/ibverbs/library.h"

namespace aioflagcx::verbs::ibverbs {
namespace {

constexpr std::uint32_t kAll = kAccessLocalWrite | kAccessRemoteRead | kAccessRemoteWrite;

struct RegistrationTest : RdmaTest {
    // What the registration of some memory fails with.
    std::string failure(int error) {
        set(&FakeVerbs::register_error, error);
        const auto device = open("fake1");
        const auto pd = device->alloc_pd();
        try {
            pd->register_memory(address_of(memory.data()), memory.size(), kAll, {});
        } catch (const NativeError& failed) {
            EXPECT_EQ(failed.call(), "ibv_reg_mr");
            EXPECT_EQ(failed.error(), error);
            return failed.detail();
        }
        return "";
    }

    std::vector<std::uint8_t> memory = std::vector<std::uint8_t>(10'000);
};

bool contains(const std::string& text, const std::string& part) {
    return text.find(part) != std::string::npos;
}

TEST_F(RegistrationTest, AFailureNamesDeviceAndRange) {
    const std::string text = failure(EINVAL);
    EXPECT_TRUE(contains(text, "fake1")) << text;
    EXPECT_TRUE(contains(text, "10000 bytes at " + std::to_string(address_of(memory.data()))))
        << text;
}

TEST_F(RegistrationTest, MemoryThatMayNotBeLockedNamesTheLimitAndHowToRaiseIt) {
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_MEMLOCK, &before), 0);
    rlimit lower = before;
    lower.rlim_cur = 65'536;
    ASSERT_EQ(::setrlimit(RLIMIT_MEMLOCK, &lower), 0);
    const std::string text = failure(ENOMEM);
    ::setrlimit(RLIMIT_MEMLOCK, &before);
    EXPECT_TRUE(contains(text, "may lock 65536 bytes")) << text;
    EXPECT_TRUE(contains(text, "ulimit -l unlimited")) << text;
    EXPECT_TRUE(contains(text, "LimitMEMLOCK=infinity")) << text;
}

TEST_F(RegistrationTest, AnAddressThatTheNicCannotReachSaysWhatItMayBe) {
    const std::string text = failure(EFAULT);
    EXPECT_TRUE(contains(text, "not all of it is mapped")) << text;
    EXPECT_TRUE(contains(text, "device memory")) << text;
    EXPECT_TRUE(contains(text, "nvidia-peermem")) << text;
}

TEST_F(RegistrationTest, MemoryThatCannotBeWrittenSaysSo) {
    EXPECT_TRUE(contains(failure(EACCES), "read-only"));
}

TEST_F(RegistrationTest, ByDefaultNothingIsRelaxed) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    const auto mr = pd->register_memory(address_of(memory.data()), memory.size(), kAll, {});
    EXPECT_FALSE(mr->read_after_write());
    ASSERT_EQ(fake.registrations.size(), 1U);
    EXPECT_EQ(fake.registrations[0].call, "ibv_reg_mr");
    EXPECT_EQ(fake.registrations[0].access, static_cast<int>(kAll));
}

TEST_F(RegistrationTest, RelaxedOrderingIsForWhatPeersMayWriteWhichTheyThenMayRead) {
    options.ibverbs.relaxed_ordering = true;
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    const std::uint64_t addr = address_of(memory.data());
    const auto written =
        pd->register_memory(addr, memory.size(), kAccessLocalWrite | kAccessRemoteWrite, {});
    const auto read = pd->register_memory(addr, memory.size(), kAccessRemoteRead, {});
    EXPECT_TRUE(written->read_after_write());
    EXPECT_FALSE(read->read_after_write());
    ASSERT_EQ(fake.registrations.size(), 2U);
    EXPECT_EQ(fake.registrations[0].call, "ibv_reg_mr_iova2");
    EXPECT_EQ(fake.registrations[0].access, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                                                IBV_ACCESS_REMOTE_READ |
                                                IBV_ACCESS_RELAXED_ORDERING);
    EXPECT_EQ(fake.registrations[1].call, "ibv_reg_mr");
    EXPECT_EQ(fake.registrations[1].access, IBV_ACCESS_REMOTE_READ);
}

TEST_F(RegistrationTest, WhatIsDeregisteredIsGone) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    auto mr = pd->register_memory(address_of(memory.data()), memory.size(), kAll, {});
    EXPECT_EQ(get(&FakeVerbs::mrs), 1);
    EXPECT_TRUE(mr->revoke(Deadline::max()));
    EXPECT_TRUE(mr->revoke(Deadline::max()));
    EXPECT_EQ(get(&FakeVerbs::mrs), 0);
    mr.reset();
    EXPECT_EQ(get(&FakeVerbs::mrs), 0);
}

// ---- fork ------------------------------------------------------------------------------------

int fork_inits = 0;
ibv_fork_status fork_status = IBV_FORK_DISABLED;

struct ForkTest : ::testing::Test {
    ForkTest() {
        fork_inits = 0;
        library.fork_init = [] {
            ++fork_inits;
            return 0;
        };
        library.is_fork_initialized = [] { return fork_status; };
    }
    Library library;
};

TEST_F(ForkTest, TheLibraryProtectsFromForkWhereTheKernelDoesNot) {
    fork_status = IBV_FORK_DISABLED;
    protect_from_fork(library);
    EXPECT_EQ(fork_inits, 1);
    library.is_fork_initialized = nullptr;  // an older library
    protect_from_fork(library);
    EXPECT_EQ(fork_inits, 2);
}

TEST_F(ForkTest, WhereTheKernelDoesTheLibraryIsNotAsked) {
    fork_status = IBV_FORK_UNNEEDED;
    protect_from_fork(library);
    EXPECT_EQ(fork_inits, 0);
}

TEST_F(RegistrationTest, ForkIsProvidedForBeforeAnythingIsRegistered) {
    const auto device = open("fake0");
    const auto pd = device->alloc_pd();
    pd->register_memory(address_of(memory.data()), memory.size(), kAll, {});
    const auto calls = get(&FakeVerbs::calls);
    EXPECT_EQ(calls.front(), "ibv_fork_init");
    EXPECT_EQ(std::count(calls.begin(), calls.end(), "ibv_fork_init"), 1);
}

// ---- Regions of several MRs ------------------------------------------------------------------

TEST_F(RdmaEngineTest, ARegionLongerThanAnMrIsSeveralThatWorkAsOne) {
    constexpr std::size_t kMr = 100'000;
    constexpr std::size_t kSize = 3 * kMr + 4321;
    set(&FakeVerbs::max_mr_size, std::uint64_t{kMr});
    start(2);
    std::vector<std::uint8_t> source(kSize);
    std::vector<std::uint8_t> target(kSize);
    std::iota(source.begin(), source.end(), std::uint8_t{1});
    add(source.data(), kSize, engine::kTableAccessRead);
    const auto id = add(target.data(), kSize, engine::kTableAccessWrite);
    ASSERT_EQ(fake.registrations.size(), 16U);  // two regions of four on two devices
    for (std::size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(fake.registrations[i].addr, address_of(source.data()) + i * kMr);
        EXPECT_EQ(fake.registrations[i].length, std::min(kMr, kSize - i * kMr));
    }
    tell_table();
    connect(1, 0);
    connect(1, 1);
    write(1, address_of(source.data()) + 7, address_of(target.data()) + 7, kSize - 7);
    wait_done(1);
    EXPECT_TRUE(std::equal(source.begin() + 7, source.end(), target.begin() + 7));
    EXPECT_TRUE(engine->regions()->remove(std::vector<std::uint64_t>{id}, Deadline::max()));
    EXPECT_EQ(get(&FakeVerbs::mrs), 8);
}

}  // namespace
}  // namespace aioflagcx::verbs::ibverbs
