#include <gtest/gtest.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "verbs/soft/local/guarded_copy.h"

namespace aioflagcx::verbs::soft::local {
namespace {

constexpr std::size_t kBytes = std::size_t{1} << 20;

TEST(GuardedCopy, CopiesWhileTheWordIsAsExpected) {
    std::atomic<std::uint64_t> word{7};
    std::vector<std::uint8_t> from(kBytes + 3);
    std::vector<std::uint8_t> to(kBytes + 3);
    for (std::size_t i = 0; i < from.size(); ++i)
        from[i] = static_cast<std::uint8_t>(i * 31 + i / 256);
    ASSERT_TRUE(guarded_copy({&word, 7}, to.data(), from.data(), from.size()));
    EXPECT_EQ(to, from);
    std::fill(to.begin(), to.end(), std::uint8_t{0});
    EXPECT_FALSE(guarded_copy({&word, 8}, to.data(), from.data(), from.size()));
    EXPECT_TRUE(std::all_of(to.begin(), to.end(), [](auto byte) { return byte == 0; }));
}

TEST(GuardedCopy, MovesWithinOneBuffer) {
    std::atomic<std::uint64_t> word{7};
    std::vector<std::uint8_t> buffer(1000);
    for (std::size_t i = 0; i < buffer.size(); ++i) buffer[i] = static_cast<std::uint8_t>(i);
    const std::vector<std::uint8_t> before(buffer.begin(), buffer.begin() + 900);
    ASSERT_TRUE(guarded_copy({&word, 7}, buffer.data() + 100, buffer.data(), 900));
    EXPECT_TRUE(std::equal(before.begin(), before.end(), buffer.begin() + 100));
}

TEST(GuardedCall, GivesWhatTheKernelSays) {
    std::atomic<std::uint64_t> word{7};
    std::vector<std::uint8_t> from(100, 1);
    std::vector<std::uint8_t> to(100, 0);
    const iovec here{from.data(), from.size()};
    const iovec there{to.data(), to.size()};
    ssize_t result = 0;
    EXPECT_FALSE(guarded_call({&word, 8}, false, ::getpid(), {&here, 1}, {&there, 1}, &result));
    EXPECT_EQ(to[0], 0);
    ASSERT_TRUE(guarded_call({&word, 7}, false, ::getpid(), {&here, 1}, {&there, 1}, &result));
    EXPECT_EQ(result, 100);
    EXPECT_EQ(to, from);
    const iovec nowhere{reinterpret_cast<void*>(16), 100};
    ASSERT_TRUE(guarded_call({&word, 7}, true, ::getpid(), {&here, 1}, {&nowhere, 1}, &result));
    EXPECT_EQ(result, -1);
    EXPECT_EQ(errno, EFAULT);
}

// Shared by the test and the process that copies.
struct Shared {
    std::atomic<std::uint64_t> word;
    std::atomic<std::uint64_t> copies;
    std::atomic<std::uint64_t> seen;    // the word that ended its last copies
    std::atomic<std::uint64_t> looked;  // the last word for which the test has looked
    std::uint8_t target[kBytes];
};

[[noreturn]] void copy_until_told(Shared& shared, bool by_call, pid_t into) {
    static std::uint8_t source[kBytes];
    const iovec here{source, kBytes};
    const iovec there{shared.target, kBytes};
    for (std::uint64_t expected = 0;; ++expected) {
        for (;;) {
            std::memset(source, static_cast<int>(shared.copies.fetch_add(1)), kBytes);
            ssize_t result = 0;
            const Guard guard{&shared.word, expected};
            const bool copied =
                by_call ? guarded_call(guard, false, into, {&here, 1}, {&there, 1}, &result)
                        : guarded_copy(guard, shared.target, source, kBytes);
            if (!copied) break;
        }
        // Until the test has looked at the target.
        shared.seen.store(expected + 1);
        while (shared.looked.load() != expected + 1) std::this_thread::yield();
    }
}

class GuardedAgainstStops : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(, GuardedAgainstStops, ::testing::Bool(),
                         [](const auto& param) { return param.param ? "call" : "copy"; });

// The process is stopped at any moment, then the word changes: what it had looked at before is not
// copied when it goes on.
TEST_P(GuardedAgainstStops, NothingIsCopiedAfterTheWordChangedUnderAStoppedThread) {
    if (!copies_are_guarded()) return;  // nothing is promised there
    void* const memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(memory, MAP_FAILED);
    Shared& shared = *static_cast<Shared*>(memory);
    const pid_t test = ::getpid();
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) copy_until_told(shared, GetParam(), test);
    std::mt19937 random(1);
    std::vector<std::uint8_t> snapshot(kBytes);
    for (std::uint64_t round = 0; round < 200; ++round) {
        const std::uint64_t copies = shared.copies.load();
        while (shared.copies.load() < copies + 2) std::this_thread::yield();
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 300));
        ASSERT_EQ(::kill(child, SIGSTOP), 0);
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
        ASSERT_TRUE(WIFSTOPPED(status));
        shared.word.store(round + 1);
        std::memcpy(snapshot.data(), shared.target, kBytes);
        ASSERT_EQ(::kill(child, SIGCONT), 0);
        while (shared.seen.load() != round + 1) std::this_thread::yield();
        EXPECT_EQ(std::memcmp(snapshot.data(), shared.target, kBytes), 0) << "round " << round;
        shared.looked.store(round + 1);
    }
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ::munmap(memory, sizeof(Shared));
}

}  // namespace
}  // namespace aioflagcx::verbs::soft::local
