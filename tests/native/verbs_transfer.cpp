// Data arrives whole, and completions tell so in posting order.
#include <poll.h>

#include <algorithm>
#include <atomic>

#include "verbs_fixture.h"

namespace aioflagcx::verbs {
namespace {

class VerbsTransfer : public OnDevices {};
VERBS_ON_EVERY_DEVICE(VerbsTransfer);

TEST_P(VerbsTransfer, WriteOfEverySizeArrivesAndTouchesNothingElse) {
    Side a(near(), 9 << 20);
    Side b(far(), 9 << 20);
    connect(*a.qp, *b.qp);
    EXPECT_EQ(a.qp->path(), path());
    EXPECT_EQ(b.qp->path(), path());
    a.fill(1);
    for (const std::uint32_t size : {0U, 1U, 3U, 4096U, 65536U, 65537U, 8U << 20}) {
        std::fill(b.buffer.begin(), b.buffer.end(), 0xEE);
        const SendWr wr = a.request(WrOpcode::RdmaWrite, b, size, size, 7, 13);
        ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
        const WorkCompletion wc = a.take_one();
        EXPECT_EQ(wc.status, WcStatus::Success);
        EXPECT_EQ(wc.opcode, WcOpcode::RdmaWrite);
        EXPECT_EQ(wc.wr_id, size);
        EXPECT_EQ(wc.qp_num, a.qp->num());
        EXPECT_EQ(std::memcmp(b.buffer.data() + 13, a.buffer.data() + 7, size), 0);
        EXPECT_EQ(std::count(b.buffer.begin(), b.buffer.begin() + 13, 0xEE), 13);
        EXPECT_TRUE(std::all_of(b.buffer.begin() + 13 + size, b.buffer.end(),
                                [](std::uint8_t byte) { return byte == 0xEE; }));
    }
}

TEST_P(VerbsTransfer, ReadOfEverySizeArrivesAndTouchesNothingElse) {
    Side a(near(), 9 << 20);
    Side b(far(), 9 << 20);
    connect(*a.qp, *b.qp);
    b.fill(2);
    for (const std::uint32_t size : {0U, 1U, 3U, 4096U, 65536U, 65537U, 8U << 20}) {
        std::fill(a.buffer.begin(), a.buffer.end(), 0xEE);
        const SendWr wr = a.request(WrOpcode::RdmaRead, b, size, size, 7, 13);
        ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
        const WorkCompletion wc = a.take_one();
        EXPECT_EQ(wc.status, WcStatus::Success);
        EXPECT_EQ(wc.opcode, WcOpcode::RdmaRead);
        EXPECT_EQ(std::memcmp(a.buffer.data() + 7, b.buffer.data() + 13, size), 0);
        EXPECT_EQ(std::count(a.buffer.begin(), a.buffer.begin() + 7, 0xEE), 7);
        EXPECT_TRUE(std::all_of(a.buffer.begin() + 7 + size, a.buffer.end(),
                                [](std::uint8_t byte) { return byte == 0xEE; }));
    }
}

TEST_P(VerbsTransfer, ThousandsOfMixedRequestsCompleteInPostingOrder) {
    constexpr std::size_t kCount = 6000;
    constexpr std::size_t kPiece = 3000;
    for (const std::uint32_t streams : {1U, 2U, 5U}) {
        // Even pieces are written to b, odd ones read from it; both buffers end up alike.
        Side a(near(streams), kCount * kPiece);
        Side b(far(streams), kCount * kPiece);
        connect(*a.qp, *b.qp);
        a.fill(3);
        b.fill(4);
        const auto from_a = a.buffer;
        const auto from_b = b.buffer;
        std::vector<SendWr> requests;
        std::mt19937 random(5);
        for (std::size_t i = 0; i < kCount; ++i) {
            const auto opcode = i % 2 == 0 ? WrOpcode::RdmaWrite : WrOpcode::RdmaRead;
            const auto size = static_cast<std::uint32_t>(random() % (kPiece + 1));
            requests.push_back(a.request(opcode, b, size, i, i * kPiece, i * kPiece));
        }
        std::vector<WorkCompletion> done;
        a.post_all(requests, done);
        const auto rest = a.take(kCount - done.size());
        done.insert(done.end(), rest.begin(), rest.end());
        ASSERT_EQ(done.size(), kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
            ASSERT_EQ(done[i].wr_id, i);
            ASSERT_EQ(done[i].status, WcStatus::Success);
            const std::size_t at = i * kPiece;
            const std::size_t size = requests[i].sge.length;
            const auto& source = i % 2 == 0 ? from_a : from_b;
            ASSERT_EQ(std::memcmp(a.buffer.data() + at, source.data() + at, size), 0) << i;
            ASSERT_EQ(std::memcmp(b.buffer.data() + at, source.data() + at, size), 0) << i;
        }
        EXPECT_TRUE(a.quiet());
    }
}

TEST_P(VerbsTransfer, LargeAndSmallRequestsMixedAcrossStreamsKeepTheirOrder) {
    constexpr std::size_t kCount = 200;
    Side a(near(4), 64 << 20);
    Side b(far(4), 64 << 20);
    connect(*a.qp, *b.qp);
    a.fill(6);
    std::vector<SendWr> requests;
    std::size_t at = 0;
    for (std::size_t i = 0; i < kCount; ++i) {
        const std::uint32_t size = i % 40 == 0 ? 5 << 20 : 100 + static_cast<std::uint32_t>(i);
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, size, i, at, at));
        at += size;
    }
    std::vector<WorkCompletion> done;
    a.post_all(requests, done);
    const auto rest = a.take(kCount - done.size());
    done.insert(done.end(), rest.begin(), rest.end());
    for (std::size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i].wr_id, i);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), at), 0);
}

TEST_P(VerbsTransfer, BothDirectionsAtOnceOnTwoPairs) {
    constexpr std::size_t kCount = 400;
    constexpr std::uint32_t kPiece = 65536;
    Side a(near(), kCount * kPiece);
    Side b(far(), kCount * kPiece);
    auto a_responder = a.make_qp();
    auto b_responder = b.make_qp();
    connect(*a.qp, *b_responder);
    connect(*b.qp, *a_responder);
    a.fill(7);
    b.fill(8);
    const auto first = a.buffer;
    const auto second = b.buffer;
    // Each sends its even pieces and thereby overwrites the other's.
    const auto run = [](Side& self, Side& peer, std::size_t parity) {
        std::vector<SendWr> requests;
        for (std::size_t i = parity; i < kCount; i += 2) {
            requests.push_back(
                self.request(WrOpcode::RdmaWrite, peer, kPiece, i, i * kPiece, i * kPiece));
        }
        std::vector<WorkCompletion> done;
        self.post_all(requests, done);
        const auto rest = self.take(requests.size() - done.size());
        done.insert(done.end(), rest.begin(), rest.end());
        for (const auto& wc : done) EXPECT_EQ(wc.status, WcStatus::Success);
    };
    std::thread other([&] { run(b, a, 1); });
    run(a, b, 0);
    other.join();
    for (std::size_t i = 0; i < kCount; ++i) {
        const auto& source = i % 2 == 0 ? first : second;
        ASSERT_EQ(std::memcmp(a.buffer.data() + i * kPiece, source.data() + i * kPiece, kPiece), 0);
        ASSERT_EQ(std::memcmp(b.buffer.data() + i * kPiece, source.data() + i * kPiece, kPiece), 0);
    }
}

TEST_P(VerbsTransfer, UnsignaledRequestsAreSilentOnSuccess) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    a.fill(9);
    std::vector<SendWr> requests;
    for (std::size_t i = 0; i < 100; ++i) {
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, 1000, i, i * 1000, i * 1000));
        requests.back().signaled = i % 10 == 9;
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    const auto done = a.take(10);
    for (std::size_t i = 0; i < done.size(); ++i) EXPECT_EQ(done[i].wr_id, i * 10 + 9);
    EXPECT_TRUE(a.quiet());
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), 100 * 1000), 0);
}

TEST_P(VerbsTransfer, PostingTakesNoMoreThanTheSendQueueHolds) {
    QpInit init = Side::defaults();
    init.max_send_wr = 8;
    Side a(near(), 1 << 20, init);
    Side b(far());
    connect(*a.qp, *b.qp);
    std::vector<SendWr> requests(20, a.request(WrOpcode::RdmaWrite, b, 10));
    EXPECT_EQ(a.qp->post_send(requests), 8U);
    a.take(8);
    EXPECT_EQ(a.qp->post_send(requests), 8U);
    a.take(8);
}

TEST_P(VerbsTransfer, OneQueuePairMayReachItsOwnDevice) {
    Side a(near());
    auto responder = a.make_qp();
    connect(*a.qp, *responder);
    a.fill(10);
    SendWr wr = a.request(WrOpcode::RdmaWrite, a, 4096, 1, 0, 8192);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    EXPECT_EQ(std::memcmp(a.buffer.data(), a.buffer.data() + 8192, 4096), 0);
    wr = a.request(WrOpcode::RdmaRead, a, 4096, 1, 16384, 8192);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    EXPECT_EQ(std::memcmp(a.buffer.data(), a.buffer.data() + 16384, 4096), 0);
}

TEST_P(VerbsTransfer, ManyPairsShareOneCompletionQueue) {
    constexpr std::size_t kPairs = 60;
    constexpr std::size_t kEach = 40;
    constexpr std::uint32_t kPiece = 2000;
    Side a(near(), kPairs * kEach * kPiece);
    Side b(far(), kPairs * kEach * kPiece);
    std::vector<std::unique_ptr<QueuePair>> initiators;
    std::vector<std::unique_ptr<QueuePair>> responders;
    for (std::size_t i = 0; i < kPairs; ++i) {
        initiators.push_back(a.make_qp());
        responders.push_back(b.make_qp());
        connect(*initiators[i], *responders[i]);
    }
    a.fill(11);
    for (std::size_t i = 0; i < kPairs; ++i) {
        std::vector<SendWr> requests;
        for (std::size_t j = 0; j < kEach; ++j) {
            const std::size_t at = (i * kEach + j) * kPiece;
            requests.push_back(a.request(WrOpcode::RdmaWrite, b, kPiece, j, at, at));
        }
        ASSERT_EQ(initiators[i]->post_send(requests), kEach);
    }
    std::map<std::uint32_t, std::uint64_t> next;
    for (const auto& wc : a.take(kPairs * kEach)) {
        EXPECT_EQ(wc.status, WcStatus::Success);
        EXPECT_EQ(wc.wr_id, next[wc.qp_num]++);
    }
    EXPECT_EQ(next.size(), kPairs);
    EXPECT_EQ(a.buffer, b.buffer);
}

// Until the descriptor or the queue's own deadline says to poll again.
void sleep_on(CompletionQueue& cq) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(
        std::min(cq.next_deadline(), soon()) - Clock::now());
    pollfd entry{cq.fd(), POLLIN, 0};
    const int timeout = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
    const bool woken = ::poll(&entry, 1, timeout) > 0;
    ASSERT_TRUE(woken || cq.next_deadline() != Deadline::max()) << "woken by nothing";
}

TEST_P(VerbsTransfer, SleepingOnTheQueuesDescriptorLosesNoCompletion) {
    // Two threads answer each other with immediates, each asleep until the other's arrives.
    const std::uint32_t rounds = soft_roce() ? 400 : 4000;
    Side a(near());
    Side b(far());
    auto a_responder = a.make_qp();
    auto b_responder = b.make_qp();
    connect(*a.qp, *b_responder);
    connect(*b.qp, *a_responder);
    const auto play = [rounds](Side& self, Side& peer, QueuePair& receiver, bool serves) {
        const auto wait_for_one = [&self](auto wanted) {
            while (true) {
                WorkCompletion wc;
                if (self.cq->poll({&wc, 1}) == 0) {
                    self.cq->arm();
                    if (self.cq->poll({&wc, 1}) == 0) {
                        sleep_on(*self.cq);
                        self.cq->disarm();
                        continue;
                    }
                    self.cq->disarm();
                }
                ASSERT_EQ(wc.status, WcStatus::Success);
                if (wanted(wc)) return;
            }
        };
        for (std::uint32_t round = 0; round < rounds; ++round) {
            const RecvWr recv{round, {}};
            receiver.post_recv({&recv, 1});
            SendWr wr = self.request(WrOpcode::RdmaWriteWithImm, peer, 8, 0, 0, 64);
            wr.imm = round;
            wr.signaled = false;
            if (serves) self.qp->post_send({&wr, 1});
            wait_for_one([round](const WorkCompletion& wc) {
                EXPECT_EQ(wc.imm, round);
                return wc.opcode == WcOpcode::RecvRdmaWithImm;
            });
            if (!serves) self.qp->post_send({&wr, 1});
            if (::testing::Test::HasFatalFailure()) return;
        }
    };
    std::atomic<bool> answered{false};
    std::thread other([&] {
        play(b, a, *b_responder, false);
        // The last answer may still need this side's progress.
        while (!answered) b.quiet();
    });
    play(a, b, *a_responder, true);
    answered = true;
    other.join();
}

}  // namespace
}  // namespace aioflagcx::verbs
