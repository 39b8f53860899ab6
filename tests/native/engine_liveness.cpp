#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <future>
#include <iterator>
#include <memory>
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

struct Counted {
    Stats stats;
};

// One engine's keepalive, and what it counts.
struct Node : Counted, Liveness {
    Node() : Liveness("127.0.0.1", stats) {}

    std::uint64_t wakeups() const { return stats.keepalive_wakeups.load(); }
};

KeepaliveToken token_of(std::uint8_t value) {
    KeepaliveToken token;
    token.fill(value);
    return token;
}

std::array<std::uint8_t, 24> hello_of(std::uint8_t value) {
    std::array<std::uint8_t, 24> hello{'A', 'F', 'K', 'A', 1, 0, 0, 0};
    std::fill(hello.begin() + 8, hello.end(), value);
    return hello;
}

UniqueFd connect_to(std::uint16_t port) {
    const SocketAddress address = SocketAddress::numeric("127.0.0.1", port);
    UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    return fd;
}

// The target sends its first as soon as it knows the token.
void take_beats(const UniqueFd& fd, int count) {
    char beat[8];
    for (int i = 0; i < count; ++i) ASSERT_EQ(::recv(fd.get(), beat, 8, MSG_WAITALL), 8);
}

UniqueFd present(const Liveness& target, std::uint8_t token) {
    UniqueFd fd = connect_to(target.port());
    EXPECT_EQ(::send(fd.get(), hello_of(token).data(), 24, MSG_NOSIGNAL), 24);
    take_beats(fd, 1);
    return fd;
}

// Waits for as long as nobody presents `token`: time that passes as this very thread sees it.
void pass(Liveness& target, Liveness::Seconds time, std::uint8_t token = 99) {
    Reason over;
    target.expect(token, token_of(token), time, time, over.callback());
    ASSERT_TRUE(over.came_within(60s));
}

TEST(Liveness, BothSidesStayAliveFarBeyondTheTimeout) {
    Reason at_target, at_initiator;
    Node target;
    Node initiator;
    target.expect(1, token_of(7), 0.02s, 0.5s, at_target.callback());
    initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.02s, 0.5s,
                    at_initiator.callback());
    pass(target, 2.5s);  // five timeouts
    EXPECT_FALSE(at_target.came_within(0ms));
    EXPECT_FALSE(at_initiator.came_within(0ms));
    target.forget(1);
    EXPECT_TRUE(at_initiator.came_within(20s));  // the target let go
}

TEST(Liveness, AnInitiatorThatNeverComesIsLostAfterTheTimeout) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 0.05s, reason.callback());
    ASSERT_TRUE(reason.came_within(20s));
    EXPECT_NE(reason.text->find("no keepalive for 0.05 s"), std::string::npos);
}

TEST(Liveness, AnInitiatorThatGoesIsLostAtOnce) {
    Reason reason, ignored;
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, reason.callback());
    {
        Node initiator;
        initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.01s, 1000s,
                        ignored.callback());
        // Alive once the target has taken the token: only then is it gone for others.
        pass(target, 0.3s);
    }
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, AnInitiatorThatStaysConnectedButSilentIsLost) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 0.1s, reason.callback());
    const UniqueFd fd = present(target, 7);
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, ATargetThatStaysConnectedButSilentIsLost) {
    Reason reason;
    Node initiator;
    std::uint16_t port = 0;
    const UniqueFd listener = listen_on("127.0.0.1", &port);
    initiator.watch(1, "127.0.0.1", port, token_of(7), 0.02s, 0.1s, reason.callback());
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, TheTargetIsHeardAsOftenAsTheInitiatorAsks) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, reason.callback());
    const UniqueFd fd = present(target, 7);
    take_beats(fd, 10);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, TheInitiatorPresentsItsTokenAndIsHeardAsOftenAsItSays) {
    Reason reason;
    Node initiator;
    std::uint16_t port = 0;
    const UniqueFd listener = listen_on("127.0.0.1", &port);
    initiator.watch(1, "127.0.0.1", port, token_of(7), 0.02s, 1000s, reason.callback());
    pollfd ready{listener.get(), POLLIN, 0};
    ASSERT_EQ(::poll(&ready, 1, 20'000), 1);
    const UniqueFd fd(::accept(listener.get(), nullptr, nullptr));
    std::array<std::uint8_t, 24> hello;
    ASSERT_EQ(::recv(fd.get(), hello.data(), 24, MSG_WAITALL), 24);
    EXPECT_EQ(hello, hello_of(7));
    take_beats(fd, 10);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, StrangersAreClosedAndDisturbNobody) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, reason.callback());
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
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, reason.callback());
    const UniqueFd first = present(target, 7);
    const UniqueFd second = connect_to(target.port());
    ASSERT_EQ(::send(second.get(), hello_of(7).data(), 24, MSG_NOSIGNAL), 24);
    char byte;
    EXPECT_LE(::recv(second.get(), &byte, 1, 0), 0);
    take_beats(first, 2);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, NobodyAtThePortIsALoss) {
    Reason reason;
    Node initiator;
    std::uint16_t port = 0;
    listen_on("127.0.0.1", &port);  // and closed again
    initiator.watch(1, "127.0.0.1", port, token_of(1), 1.0s, 1000s, reason.callback());
    ASSERT_TRUE(reason.came_within(20s));
    EXPECT_NE(reason.text->find("Connection refused"), std::string::npos);
}

// ---- A thread that must serve all, whatever one peer does ---------------------------------------

TEST(Liveness, APeerThatNeverStopsSendingDelaysNobody) {
    Reason flooded;
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, flooded.callback());
    const UniqueFd fd = present(target, 7);
    std::atomic<bool> stop{false};
    std::thread flood([&] {
        const std::vector<char> bytes(1 << 20, 'p');
        while (!stop) ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
    });
    pass(target, 0.1s);
    stop = true;
    flood.join();
    EXPECT_FALSE(flooded.came_within(0ms));
}

TEST(Liveness, WhatAPeerSendsTooMuchStaysAtThePeer) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 1000s, 1000s, reason.callback());  // it does not read meanwhile
    const UniqueFd fd = present(target, 7);
    pass(target, 0.01s);
    const std::uint64_t before = target.wakeups();
    const std::vector<char> bytes(1 << 20, 'p');
    int room = 4'096;  // the peer's own
    ASSERT_EQ(::setsockopt(fd.get(), SOL_SOCKET, SO_SNDBUF, &room, sizeof room), 0);
    ssize_t taken = 0;
    for (pollfd ready{fd.get(), POLLOUT, 0}; ::poll(&ready, 1, 200) == 1;) {
        taken += ::send(fd.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
        ASSERT_LT(taken, 1 << 16);
    }
    EXPECT_EQ(target.wakeups(), before);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, IdleStrangersKeepNobodyOut) {
    Reason at_target, at_initiator;
    Node target;
    Node initiator;
    std::vector<UniqueFd> idle;
    for (int i = 0; i < 300; ++i) idle.push_back(connect_to(target.port()));
    target.expect(1, token_of(7), 0.02s, 1000s, at_target.callback());
    initiator.watch(2, "127.0.0.1", target.port(), token_of(7), 0.01s, 1000s,
                    at_initiator.callback());
    pass(target, 0.3s);
    EXPECT_FALSE(at_initiator.came_within(0ms));
    EXPECT_FALSE(at_target.came_within(0ms));
}

// Makes the thread busy for this long, as fencing a slow device may; returns when it is.
void hold_up(Node& target, std::chrono::milliseconds time) {
    const auto busy = std::make_shared<std::promise<void>>();
    target.expect(50, token_of(50), 0.02s, 1000s, [time, busy](const std::string&) {
        busy->set_value();
        std::this_thread::sleep_for(time);
    });
    present(target, 50);  // and gone again
    busy->get_future().wait();
}

TEST(Liveness, BeatsThatCameWhileTheThreadWasBusyCount) {
    Reason alive;
    Node target;
    target.expect(1, token_of(7), 0.02s, 0.3s, alive.callback());
    const UniqueFd fd = present(target, 7);
    hold_up(target, 600ms);
    Reason proof;
    target.expect(3, token_of(9), 0.02s, 0.05s, proof.callback());
    for (int i = 0; i < 40 && !proof.came_within(20ms); ++i) {
        ASSERT_EQ(::send(fd.get(), "beatbeat", 8, MSG_NOSIGNAL), 8);
    }
    EXPECT_TRUE(proof.came_within(0ms));
    EXPECT_FALSE(alive.came_within(0ms));
}

TEST(Liveness, WhatComesBetweenTwoTicksIsSeenInTime) {
    Reason reason, proof;
    Node target;
    target.expect(1, token_of(7), 60s, 1s, reason.callback());
    const UniqueFd fd = present(target, 7);
    target.expect(3, token_of(9), 60s, 2.5s, proof.callback());
    while (!proof.came_within(10ms)) ASSERT_EQ(::send(fd.get(), "beatbeat", 8, MSG_NOSIGNAL), 8);
    EXPECT_FALSE(reason.came_within(0ms));
    EXPECT_TRUE(reason.came_within(20s));
}

TEST(Liveness, AnInitiatorThatCameWhileTheThreadWasBusyCounts) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 0.3s, reason.callback());
    hold_up(target, 600ms);
    const UniqueFd fd = connect_to(target.port());
    ASSERT_EQ(::send(fd.get(), hello_of(7).data(), 24, MSG_NOSIGNAL), 24);
    take_beats(fd, 1);
    EXPECT_FALSE(reason.came_within(0ms));
}

TEST(Liveness, WithoutDescriptorsTheListenerRests) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 0.02s, 1000s, reason.callback());
    const UniqueFd fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    rlimit before{};
    ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &before), 0);
    rlimit none = before;
    none.rlim_cur = static_cast<rlim_t>(UniqueFd(::dup(fd.get())).get());
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
    const SocketAddress address = SocketAddress::numeric("127.0.0.1", target.port());
    EXPECT_EQ(::connect(fd.get(), address.get(), address.length), 0);
    const std::uint64_t wakeups = target.wakeups();
    pass(target, 0.5s);
    EXPECT_LT(target.wakeups(), wakeups + 30);  // kKeepaliveAcceptPause makes two each time
    ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &before), 0);
    ASSERT_EQ(::send(fd.get(), hello_of(7).data(), 24, MSG_NOSIGNAL), 24);
    take_beats(fd, 1);
}

// ---- What it costs ------------------------------------------------------------------------------

// Wake-ups of both sides in `time`, with `sessions` that were told to beat every `interval`.
std::uint64_t wakeups_of(std::uint8_t sessions, Liveness::Seconds interval,
                         Liveness::Seconds time) {
    Reason at_target, at_initiator;
    Node target;
    Node initiator;
    for (std::uint8_t i = 0; i < sessions; ++i) {
        target.expect(i, token_of(i), interval, 1000s, at_target.callback());
        initiator.watch(i, "127.0.0.1", target.port(), token_of(i), interval, 1000s,
                        at_initiator.callback());
    }
    pass(target, 0.3s);
    const std::uint64_t before = target.wakeups() + initiator.wakeups();
    pass(target, time);
    EXPECT_FALSE(at_target.came_within(0ms));
    EXPECT_FALSE(at_initiator.came_within(0ms));
    return target.wakeups() + initiator.wakeups() - before;
}

TEST(Liveness, ManySessionsWakeTheThreadsNoMoreThanOne) {
    // Ten ticks on either side, and what pass() does. A wake-up a session would make hundreds.
    EXPECT_LT(wakeups_of(64, 0.1s, 1s), 40u);
}

TEST(Liveness, AnIdleSessionIsQuietBetweenItsBeats) { EXPECT_LT(wakeups_of(64, 60s, 1s), 10u); }

TEST(Liveness, NoPeerCanAskForBeatsWithoutEnd) {
    Reason reason;
    Node target;
    target.expect(1, token_of(7), 1e-9s, 1000s, reason.callback());
    const UniqueFd fd = present(target, 7);
    const std::uint64_t before = target.wakeups();
    pass(target, 0.5s);
    EXPECT_LT(target.wakeups(), before + 100);  // 50 ticks of kMinKeepaliveInterval
}

TEST(Liveness, IntervalsOfAllLengthsShareTheTick) {
    Reason reason;
    Node target;
    const Liveness::Seconds intervals[] = {60s, 0.13s, 0.11s, 0.1s, 0.17s, 0.15s, 0.19s};
    std::vector<UniqueFd> peers;
    for (std::uint8_t i = 0; i < std::size(intervals); ++i) {
        target.expect(i, token_of(i), intervals[i], 1000s, reason.callback());
        peers.push_back(present(target, i));
    }
    pass(target, 0.3s);
    const std::uint64_t before = target.wakeups();
    pass(target, 1s);
    EXPECT_LT(target.wakeups(), before + 20);  // ten ticks, where each for itself makes 41
    char beats[1'000];
    EXPECT_EQ(::recv(peers[0].get(), beats, sizeof beats, MSG_DONTWAIT), -1);  // one in a minute
    EXPECT_EQ(errno, EAGAIN);
    for (std::size_t i = 1; i < peers.size(); ++i) {
        // Each of the thirteen ticks, since none of them can wait for the one after the next.
        EXPECT_GT(::recv(peers[i].get(), beats, sizeof beats, MSG_DONTWAIT), 9 * 8);
    }
}

TEST(Liveness, AShortTimeoutIsKeptBesideALongInterval) {
    Reason slow, fast, gone;
    Node target;
    target.expect(1, token_of(1), 60s, 1000s, slow.callback());
    const UniqueFd calm = present(target, 1);
    target.expect(2, token_of(2), 0.01s, 0.1s, fast.callback());
    const UniqueFd quick = present(target, 2);
    target.expect(3, token_of(3), 60s, 0.1s, gone.callback());
    const UniqueFd silent = present(target, 3);
    for (int i = 0; i < 30; ++i) {
        take_beats(quick, 1);
        ASSERT_EQ(::send(quick.get(), "beatbeat", 8, MSG_NOSIGNAL), 8);
    }
    EXPECT_FALSE(fast.came_within(0ms));
    EXPECT_TRUE(gone.came_within(20s));
    EXPECT_TRUE(fast.came_within(20s));
    EXPECT_FALSE(slow.came_within(0ms));
}

// ---- A child of fork() --------------------------------------------------------------------------

// Holds copies of all descriptors until the end of the test.
class Child {
  public:
    Child() : pid_(::fork()) {
        if (pid_ != 0) return;
        for (;;) ::pause();
    }
    ~Child() {
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }

  private:
    pid_t pid_;
};

TEST(Liveness, AForkedChildKeepsNoConnectionOpen) {
    Reason reason, ignored, unaccepted;
    Node initiator;
    std::optional<Node> target(std::in_place);
    const std::uint16_t port = target->port();
    for (std::uint8_t i = 0; i < 2; ++i) {
        target->expect(i, token_of(i), 1000s, 1000s, ignored.callback());
    }
    initiator.watch(1, "127.0.0.1", port, token_of(0), 1000s, 1000s, reason.callback());
    pass(*target, 0.3s);
    const UniqueFd peer = present(*target, 1);
    const Child child;

    target->forget(0);
    EXPECT_TRUE(reason.came_within(20s));
    const std::uint64_t before = target->wakeups();
    pass(*target, 0.2s);
    EXPECT_LT(target->wakeups(), before + 10);  // no event of a connection that is gone

    target.reset();
    char byte;
    EXPECT_LE(::recv(peer.get(), &byte, 1, 0), 0);
    initiator.watch(2, "127.0.0.1", port, token_of(1), 1000s, 1000s, unaccepted.callback());
    EXPECT_TRUE(unaccepted.came_within(20s));
}

}  // namespace
}  // namespace aioflagcx::engine
