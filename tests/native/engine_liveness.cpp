#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <ctime>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/socket_address.h"
#include "engine/liveness.h"

namespace aioflagcx::engine {
namespace {

using namespace std::chrono_literals;

// A reason that arrives once. Declared before the Liveness that reports it, so that it is there as
// long as the thread is.
struct Reason {
    std::mutex mutex;
    std::condition_variable came;
    std::optional<std::string> text;

    Liveness::Lost callback() {
        return [this](const std::string& reason) {
            const std::lock_guard lock(mutex);
            text = reason;
            came.notify_all();
        };
    }
    bool came_within(std::chrono::milliseconds time) {
        std::unique_lock lock(mutex);
        return came.wait_for(lock, time, [this] { return text.has_value(); });
    }
};

KeepaliveToken token_of(std::uint8_t value) {
    KeepaliveToken token;
    token.fill(value);
    return token;
}

UniqueFd connect_to(std::uint16_t port) {
    const SocketAddress address = SocketAddress::numeric("127.0.0.1", port);
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    return fd;
}

TEST(Liveness, BothSidesStayAliveFarBeyondTheTimeout) {
    Reason at_target, at_initiator, proof;
    Liveness target("127.0.0.1");
    Liveness initiator("127.0.0.1");
    target.expect(1, token_of(7), 0.2s, at_target.callback());
    initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.02s, 0.2s,
                    at_initiator.callback());
    // A session that nobody keeps alive ends after five timeouts of the one under test.
    target.expect(3, token_of(9), 1.0s, proof.callback());
    EXPECT_TRUE(proof.came_within(20s));
    EXPECT_FALSE(at_target.came_within(0ms));
    EXPECT_FALSE(at_initiator.came_within(0ms));
    target.forget(1);
    EXPECT_TRUE(at_initiator.came_within(20s));  // the target let go
}

TEST(Liveness, AnInitiatorThatNeverComesIsLostAfterTheTimeout) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 0.05s, reason.callback());
    ASSERT_TRUE(reason.came_within(20s));
    EXPECT_NE(reason.text->find("no keepalive for 0.05 s"), std::string::npos);
}

TEST(Liveness, AnInitiatorThatGoesIsLostAtOnce) {
    Reason reason, ignored, answered;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, reason.callback());
    {
        Liveness initiator("127.0.0.1");
        initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.01s, 1000s,
                        ignored.callback());
        // Alive once the target has taken the token: only then is it gone for others.
        target.expect(3, token_of(9), 0.3s, answered.callback());
        EXPECT_TRUE(answered.came_within(20s));
    }
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, AnInitiatorThatStaysConnectedButSilentIsLost) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 0.1s, reason.callback());
    const UniqueFd fd = connect_to(target.port());
    std::uint8_t hello[24] = {'A', 'F', 'K', 'A', 1, 0, 0, 0};
    std::memset(hello + 8, 7, 16);
    ASSERT_EQ(::send(fd.get(), hello, sizeof hello, 0), 24);
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, PingsComeBackAsTheyWere) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, reason.callback());
    const UniqueFd fd = connect_to(target.port());
    std::uint8_t hello[24] = {'A', 'F', 'K', 'A', 1, 0, 0, 0};
    std::memset(hello + 8, 7, 16);
    ASSERT_EQ(::send(fd.get(), hello, sizeof hello, 0), 24);
    ASSERT_EQ(::send(fd.get(), "pingping", 8, 0), 8);
    char answer[8];
    ASSERT_EQ(::recv(fd.get(), answer, 8, MSG_WAITALL), 8);
    EXPECT_EQ(std::memcmp(answer, "pingping", 8), 0);
}

TEST(Liveness, StrangersAreClosedAndDisturbNobody) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, reason.callback());
    for (const char* bytes :
         {"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "AFKA\1\0\0\0................"}) {
        const UniqueFd fd = connect_to(target.port());
        ASSERT_GT(::send(fd.get(), bytes, 24, MSG_NOSIGNAL), 0);
        char byte;
        EXPECT_LE(::recv(fd.get(), &byte, 1, 0), 0);
    }
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, ATokenIsGoodForOneConnection) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, reason.callback());
    std::uint8_t hello[32] = {'A', 'F', 'K', 'A', 1, 0, 0, 0};
    std::memset(hello + 8, 7, 16);
    const UniqueFd first = connect_to(target.port());
    ASSERT_EQ(::send(first.get(), hello, 32, 0), 32);  // with a ping
    char answer[8];
    ASSERT_EQ(::recv(first.get(), answer, 8, MSG_WAITALL), 8);
    const UniqueFd second = connect_to(target.port());
    ASSERT_EQ(::send(second.get(), hello, 24, 0), 24);
    EXPECT_LE(::recv(second.get(), answer, 1, 0), 0);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, NobodyAtThePortIsALoss) {
    Reason reason;
    Liveness initiator("127.0.0.1");
    std::uint16_t port = 0;
    listen_on("127.0.0.1", &port);  // and closed again
    initiator.watch(1, "127.0.0.1", port, token_of(1), 1.0s, 1000s, reason.callback());
    ASSERT_TRUE(reason.came_within(20s));
    EXPECT_NE(reason.text->find("Connection refused"), std::string::npos);
}

// ---- A thread that must serve all, whatever one peer does ---------------------------------------

std::array<std::uint8_t, 24> hello_of(std::uint8_t value) {
    std::array<std::uint8_t, 24> hello{'A', 'F', 'K', 'A', 1, 0, 0, 0};
    std::fill(hello.begin() + 8, hello.end(), value);
    return hello;
}

TEST(Liveness, APeerThatNeverStopsSendingDelaysNobody) {
    Reason flooded, other;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, flooded.callback());
    const UniqueFd fd = connect_to(target.port());
    ASSERT_EQ(::send(fd.get(), hello_of(7).data(), 24, 0), 24);
    std::atomic<bool> stop{false};
    std::thread flood([&] {
        const std::vector<char> pings(1 << 20, 'p');
        while (!stop) ::send(fd.get(), pings.data(), pings.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    });
    std::this_thread::sleep_for(50ms);
    target.expect(2, token_of(8), 0.1s, other.callback());
    EXPECT_TRUE(other.came_within(10s));
    stop = true;
    flood.join();
}

TEST(Liveness, IdleStrangersKeepNobodyOut) {
    Reason at_target, at_initiator, proof;
    Liveness target("127.0.0.1");
    Liveness initiator("127.0.0.1");
    std::vector<UniqueFd> idle;
    for (int i = 0; i < 300; ++i) idle.push_back(connect_to(target.port()));
    target.expect(1, token_of(7), 1000s, at_target.callback());
    initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.01s, 1000s,
                    at_initiator.callback());
    target.expect(3, token_of(9), 0.3s, proof.callback());
    EXPECT_TRUE(proof.came_within(20s));
    EXPECT_FALSE(at_initiator.came_within(0ms));
    EXPECT_FALSE(at_target.came_within(0ms));
}

TEST(Liveness, WhatCameWhileTheThreadWasBusyCounts) {
    Reason alive, proof;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 0.3s, alive.callback());
    target.expect(2, token_of(8), 1000s, [](const std::string&) {
        std::this_thread::sleep_for(600ms);  // as fencing a slow device may take
    });
    const UniqueFd fd = connect_to(target.port());
    ASSERT_EQ(::send(fd.get(), hello_of(7).data(), 24, 0), 24);
    {
        const UniqueFd goes = connect_to(target.port());
        ASSERT_EQ(::send(goes.get(), hello_of(8).data(), 24, 0), 24);
        std::this_thread::sleep_for(50ms);
    }
    std::this_thread::sleep_for(50ms);
    target.expect(3, token_of(9), 0.05s, proof.callback());
    for (int i = 0; i < 40 && !proof.came_within(20ms); ++i) {
        ASSERT_EQ(::send(fd.get(), "pingping", 8, 0), 8);
    }
    EXPECT_FALSE(alive.came_within(0ms));
}

TEST(Liveness, WithoutDescriptorsTheListenerRests) {
    Reason reason;
    Liveness target("127.0.0.1");
    target.expect(1, token_of(7), 1000s, reason.callback());
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit none = before;
    none.rlim_cur = static_cast<rlim_t>(UniqueFd(::dup(fd.get())).get());
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const std::clock_t start = std::clock();  // of all threads
    const SocketAddress address = SocketAddress::numeric("127.0.0.1", target.port());
    EXPECT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    std::this_thread::sleep_for(500ms);
    EXPECT_LT(std::clock() - start, CLOCKS_PER_SEC / 10);
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_EQ(::send(fd.get(), hello_of(7).data(), 24, 0), 24);
    ASSERT_EQ(::send(fd.get(), "pingping", 8, 0), 8);
    char answer[8];
    EXPECT_EQ(::recv(fd.get(), answer, 8, MSG_WAITALL), 8);
}

}  // namespace
}  // namespace aioflagcx::engine
