#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <random>
#include <stdexcept>
#include <vector>

#include "common/unique_fd.h"
#include "verbs/soft/guarded_receive.h"
#include "verbs/soft/own_rseq.h"
#include "verbs/soft/socket.h"

extern "C" {
extern const char aioflagcx_receive_cs[];
}

namespace aioflagcx::verbs::soft {
namespace {

struct Connection {
    UniqueFd initiator;
    UniqueFd target;

    Connection() {
        UniqueFd listener(::socket(AF_INET, SOCK_STREAM, 0));
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        auto* const generic = reinterpret_cast<sockaddr*>(&address);
        socklen_t size = sizeof address;
        if (::bind(listener.get(), generic, size) != 0 || ::listen(listener.get(), 1) != 0 ||
            ::getsockname(listener.get(), generic, &size) != 0) {
            throw std::runtime_error("no listener");
        }
        initiator = UniqueFd(::socket(AF_INET, SOCK_STREAM, 0));
        if (::connect(initiator.get(), generic, size) != 0) throw std::runtime_error("connect");
        target = UniqueFd(::accept(listener.get(), nullptr, nullptr));
    }

    // Without waiting; false if nothing went in.
    bool send_some(std::uint8_t value) const {
        const std::vector<std::uint8_t> data(std::size_t{1} << 16, value);
        return ::send(initiator.get(), data.data(), data.size(), MSG_DONTWAIT | MSG_NOSIGNAL) > 0;
    }

    // Until no more goes in, which needs a target that does not receive meanwhile.
    void fill(std::uint8_t value) const {
        while (send_some(value)) {
        }
    }
};

ssize_t receive_into(int fd, void* target, std::size_t size) {
    iovec piece{target, size};
    return receive_wanted(fd, {&piece, 1});
}

TEST(GuardedReceive, GivesWhatHasCome) {
    const Connection connection;
    std::array<std::uint8_t, 8> buffer{};
    EXPECT_EQ(receive_into(connection.target.get(), buffer.data(), 8), -1);
    EXPECT_EQ(errno, EAGAIN);
    ASSERT_EQ(::send(connection.initiator.get(), "abc", 3, 0), 3);
    EXPECT_EQ(receive_into(connection.target.get(), buffer.data(), 2), 2);
    EXPECT_EQ(receive_into(connection.target.get(), buffer.data() + 2, 6), 1);
    EXPECT_EQ(std::memcmp(buffer.data(), "abc", 4), 0);
    ASSERT_EQ(::send(connection.initiator.get(), "d", 1, 0), 1);
    EXPECT_EQ(receive_into(connection.target.get(), reinterpret_cast<void*>(16), 1), -1);
    EXPECT_EQ(errno, EFAULT);
}

TEST(GuardedReceive, WhatIsUnreadIsNotStoredAfterAResetOrTheEnd) {
    for (const bool reset : {true, false}) {
        const Connection connection;
        connection.fill(1);
        std::vector<std::uint8_t> buffer(100, 7);
        ASSERT_EQ(receive_into(connection.target.get(), buffer.data(), 50), 50);
        if (reset) {
            reset_connection(connection.initiator.get());
        } else {
            while (::recv(connection.target.get(), buffer.data() + 50, 50, MSG_DONTWAIT) > 0) {
            }
            std::fill(buffer.begin() + 50, buffer.end(), std::uint8_t{7});
            ASSERT_EQ(::send(connection.initiator.get(), "end", 3, 0), 3);
            ::shutdown(connection.initiator.get(), SHUT_RDWR);
        }
        EXPECT_EQ(receive_into(connection.target.get(), buffer.data() + 50, 50), -1);
        EXPECT_EQ(errno, ECONNRESET);
        EXPECT_TRUE(std::all_of(buffer.begin() + 50, buffer.end(), [](auto b) { return b == 7; }));
    }
}

TEST(GuardedReceive, AResetSendsNothingMoreAndReachesAFullReceiver) {
    const Connection connection;
    connection.fill(1);
    const int copy = ::dup(connection.initiator.get());  // as a forked child has one
    reset_connection(connection.initiator.get());
    std::uint8_t byte = 7;
    EXPECT_EQ(receive_into(connection.target.get(), &byte, 1), -1);
    EXPECT_EQ(errno, ECONNRESET);
    EXPECT_EQ(byte, 7);
    ::close(copy);
}

#if AIOFLAGCX_RSEQ
TEST(GuardedReceive, TheKernelTakesBackWhatIsAnnouncedWhenTheThreadStandsStill) {
    struct rseq* const own = own_rseq();
    if (own == nullptr) return;  // then nothing is guarded here, which receive_wanted() lives with
    announce(own, aioflagcx_receive_cs);
    const timespec moment{0, 1000000};
    ::nanosleep(&moment, nullptr);
    EXPECT_EQ(reinterpret_cast<volatile std::uint64_t*>(own)[1], 0U);
}
#endif

// Shared by the test and the process that receives.
struct Shared {
    std::atomic<std::uint64_t> received;
    std::atomic<bool> ended;  // it has seen that the stream is over
    std::uint8_t target[std::size_t{1} << 16];
};

TEST(GuardedReceive, NothingIsStoredAfterAResetUnderAStoppedThread) {
    auto* const shared = static_cast<Shared*>(
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    ASSERT_NE(static_cast<void*>(shared), MAP_FAILED);
    std::mt19937 random(1);
    for (int round = 0; round < 200; ++round) {
        const Connection connection;
        shared->received = 0;
        shared->ended = false;
        const pid_t child = ::fork();
        ASSERT_GE(child, 0);
        if (child == 0) {
            for (;;) {
                const ssize_t got = receive_into(connection.target.get(), shared->target, 4096);
                if (got > 0) shared->received.fetch_add(static_cast<std::uint64_t>(got));
                if (got == 0 || (got < 0 && errno != EAGAIN)) break;
            }
            shared->ended = true;
            ::_exit(0);
        }
        const auto end = std::chrono::steady_clock::now() +
                         std::chrono::microseconds(std::uniform_int_distribution(0, 3000)(random));
        while (shared->received == 0 || std::chrono::steady_clock::now() < end) {
            connection.send_some(1);
        }
        ::kill(child, SIGSTOP);
        int status = 0;
        ASSERT_EQ(::waitpid(child, &status, WUNTRACED), child);
        ASSERT_TRUE(WIFSTOPPED(status));
        connection.fill(1);
        reset_connection(connection.initiator.get());
        std::memset(shared->target, 7, sizeof shared->target);
        ::kill(child, SIGCONT);
        ASSERT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_TRUE(shared->ended);
        EXPECT_TRUE(std::all_of(std::begin(shared->target), std::end(shared->target),
                                [](auto byte) { return byte == 7; }))
            << "round " << round;
    }
    ::munmap(shared, sizeof(Shared));
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
