// What a soft device notices of its peers' ends.
#include <algorithm>

#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
namespace {

class SoftLifetime : public OnPath {};
SOFT_ON_EVERY_PATH(SoftLifetime);

TEST_P(SoftLifetime, AResponderLearnsOfItsInitiatorsEnd) {
    for (std::size_t round = 0; round < 10; ++round) {
        Side a(options(), 32 << 20);
        Side b(options(), 32 << 20);
        connect(*a.qp, *b.qp);
        const RecvWr recv = b.receive(5);
        b.qp->post_recv({&recv, 1});
        std::vector<SendWr> requests(32, a.request(WrOpcode::RdmaWrite, b, 1 << 20));
        a.qp->post_send(requests);
        a.take(round);
        a.qp.reset();
        const WorkCompletion wc = b.take_one();
        EXPECT_EQ(wc.wr_id, 5U);
        EXPECT_EQ(wc.status, WcStatus::WrFlushErr);
        EXPECT_EQ(b.qp->state(), QpState::Err);
    }
}

TEST_P(SoftLifetime, DestroyingAnInitiatorsRegionFailsItsWrites) {
    Side a(options(), 64 << 20);
    Side b(options(), 64 << 20);
    connect(*a.qp, *b.qp);
    std::vector<SendWr> requests(64, a.request(WrOpcode::RdmaWrite, b, 1 << 20));
    a.qp->post_send(requests);
    a.mr.reset();
    a.qp->post_send({requests.data(), 1});
    bool failed = false;
    for (const auto& wc : a.take(65)) {
        if (wc.status == WcStatus::Success) {
            EXPECT_FALSE(failed);
        } else if (wc.status == WcStatus::LocProtErr) {
            EXPECT_FALSE(std::exchange(failed, true));
        } else {
            EXPECT_EQ(wc.status, WcStatus::WrFlushErr);
        }
    }
    EXPECT_TRUE(failed);
}

TEST(SoftTcpLifetime, AnIdleInitiatorLearnsOfItsPeersEndByPolling) {
    Side a(options_for("tcp"));
    Side b(options_for("tcp"));
    connect(*a.qp, *b.qp);
    b.qp.reset();
    const Deadline deadline = soon();
    while (a.qp->state() != QpState::Err && Clock::now() < deadline) EXPECT_TRUE(a.quiet());
    EXPECT_EQ(a.qp->state(), QpState::Err);
    const SendWr requests[] = {a.request(WrOpcode::RdmaWrite, b, 10, 1),
                               a.request(WrOpcode::RdmaWrite, b, 10, 2)};
    a.qp->post_send(requests);
    const auto done = a.take(2);
    EXPECT_EQ(done[0].status, WcStatus::RetryExcErr);
    EXPECT_EQ(done[1].status, WcStatus::WrFlushErr);
}

TEST(SoftTcpLifetime, FenceCoversWhatWaitsInTheKernelsBuffers) {
    Side a(options_for("tcp", 1), 64 << 20);
    Side b(options_for("tcp", 1), 64 << 20);
    connect(*a.qp, *b.qp);
    a.fill(3);
    // An initiator that does not take its read data: the responder stops taking requests, and
    // the writes behind the reads wait in the sockets' buffers.
    std::vector<SendWr> requests;
    for (std::uint64_t i = 0; i < 900; ++i) {
        requests.push_back(a.request(WrOpcode::RdmaRead, b, 1 << 16, i));
    }
    for (std::uint64_t i = 0; i < 100; ++i) {
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, 1 << 10, 900 + i, 0, i << 10));
    }
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    b.qp->fence(soon());
    const auto snapshot = b.buffer;
    const auto done = a.take(requests.size());
    EXPECT_EQ(done.back().status, WcStatus::WrFlushErr);
    EXPECT_EQ(b.buffer, snapshot);
    EXPECT_EQ(std::count(b.buffer.begin(), b.buffer.end(), 0), 64 << 20);
}

TEST(SoftTcpLifetime, DestroyingARegionInTheMiddleOfItsReadDataIsARemoteAccessError) {
    for (int round = 0; round < 10; ++round) {
        Side a(options_for("tcp", 2), 64 << 20);
        Side b(options_for("tcp", 2), 64 << 20);
        connect(*a.qp, *b.qp);
        std::vector<SendWr> requests;
        for (std::uint64_t i = 0; i < 32; ++i) {
            requests.push_back(a.request(WrOpcode::RdmaRead, b, 2 << 20, i, i << 21, i << 21));
        }
        ASSERT_EQ(a.qp->post_send(requests), requests.size());
        std::size_t before = a.take(static_cast<std::size_t>(round)).size();
        b.mr.reset();
        std::size_t refused = 0;
        for (const auto& wc : a.take(32 - before)) {
            if (wc.status == WcStatus::RemAccessErr) {
                ++refused;
            } else if (wc.status != WcStatus::Success) {
                EXPECT_EQ(wc.status, WcStatus::WrFlushErr) << wc_status_name(wc.status);
            }
        }
        EXPECT_EQ(refused, 1U);
    }
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
