// Sends, immediates and receivers that are not ready.
#include <algorithm>
#include <set>

#include "verbs_fixture.h"

namespace aioflagcx::verbs {
namespace {

class VerbsReceive : public OnDevices {};
VERBS_ON_EVERY_DEVICE(VerbsReceive);

TEST_P(VerbsReceive, AnImmediateComesAfterAllDataPostedBeforeIt) {
    constexpr std::size_t kCount = 300;
    Side a(near(4), kCount * 65536);
    Side b(far(4), kCount * 65536);
    connect(*a.qp, *b.qp);
    for (std::uint32_t round = 0; round < 5; ++round) {
        a.fill(round);
        const RecvWr recv = b.receive(100 + round);
        b.qp->post_recv({&recv, 1});
        std::vector<SendWr> requests;
        // The first is long: an immediate on another stream would overtake it.
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, kCount / 2 * 65536, 0));
        for (std::size_t i = kCount / 2; i < kCount; ++i) {
            requests.push_back(a.request(WrOpcode::RdmaWrite, b, 65536, i, i * 65536, i * 65536));
        }
        for (SendWr& wr : requests) wr.signaled = false;
        SendWr imm;
        imm.opcode = WrOpcode::RdmaWriteWithImm;
        imm.imm = 0xABCD0000 + round;
        requests.push_back(imm);
        // Requests after the immediate must not overtake it.
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, 1, 999, 5, 5));
        ASSERT_EQ(a.qp->post_send(requests), requests.size());
        std::thread worker([&a] { a.take(2); });
        const WorkCompletion wc = b.take_one();
        // At this moment, not once the initiator has seen everything complete.
        EXPECT_TRUE(std::equal(a.buffer.begin() + 6, a.buffer.end(), b.buffer.begin() + 6));
        EXPECT_EQ(wc.status, WcStatus::Success);
        EXPECT_EQ(wc.opcode, WcOpcode::RecvRdmaWithImm);
        EXPECT_EQ(wc.wr_id, 100 + round);
        EXPECT_TRUE(wc.with_imm);
        EXPECT_EQ(wc.imm, imm.imm);
        EXPECT_EQ(wc.byte_len, 0U);
        EXPECT_EQ(wc.qp_num, b.qp->num());
        worker.join();
    }
}

TEST_P(VerbsReceive, AWriteWithImmediateCarriesDataAndItsLength) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    a.fill(1);
    const RecvWr recv = b.receive(1);
    b.qp->post_recv({&recv, 1});
    SendWr wr = a.request(WrOpcode::RdmaWriteWithImm, b, 5000, 2, 0, 100);
    wr.imm = 42;
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().opcode, WcOpcode::RdmaWrite);
    const WorkCompletion wc = b.take_one();
    EXPECT_EQ(wc.byte_len, 5000U);
    EXPECT_EQ(wc.imm, 42U);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data() + 100, 5000), 0);
}

TEST_P(VerbsReceive, SendsFillPostedReceivesInOrder) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    a.fill(2);
    std::vector<RecvWr> receives;
    std::vector<SendWr> requests;
    for (std::uint64_t i = 0; i < 50; ++i) {
        receives.push_back(b.receive(i, 10000, i * 10000));
        requests.push_back(
            a.request(WrOpcode::Send, b, static_cast<std::uint32_t>(i * 200), i, i * 10000));
    }
    b.qp->post_recv(receives);
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    for (const auto& wc : a.take(50)) EXPECT_EQ(wc.opcode, WcOpcode::Send);
    const auto got = b.take(50);
    for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].status, WcStatus::Success);
        EXPECT_EQ(got[i].opcode, WcOpcode::Recv);
        EXPECT_FALSE(got[i].with_imm);
        EXPECT_EQ(got[i].wr_id, i);
        EXPECT_EQ(got[i].byte_len, i * 200);
        EXPECT_EQ(std::memcmp(a.buffer.data() + i * 10000, b.buffer.data() + i * 10000, i * 200),
                  0);
    }
}

TEST_P(VerbsReceive, ASendLongerThanTheReceiveFailsOnBothSides) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    const RecvWr receives[] = {b.receive(1, 99), b.receive(2, 99)};
    b.qp->post_recv(receives);
    const SendWr wr = a.request(WrOpcode::Send, b, 100);
    a.qp->post_send({&wr, 1});
    // Soft-RoCE has other statuses for this.
    EXPECT_EQ(a.take_one().status, soft_roce() ? WcStatus::RemOpErr : WcStatus::RemInvReqErr);
    const auto got = b.take(2);
    EXPECT_EQ(got[0].status, soft_roce() ? WcStatus::LocQpOpErr : WcStatus::LocLenErr);
    EXPECT_EQ(got[1].status, WcStatus::WrFlushErr);
    EXPECT_EQ(b.qp->state(), QpState::Err);
    EXPECT_EQ(std::count(b.buffer.begin(), b.buffer.end(), 0), 1 << 20);
}

TEST_P(VerbsReceive, ASendIntoAReceiveWithABadKeyFailsOnBothSides) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    RecvWr receives[] = {b.receive(1, 100), b.receive(2, 100)};
    receives[0].sge.lkey ^= 1;
    b.qp->post_recv(receives);
    const SendWr wr = a.request(WrOpcode::Send, b, 100);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::RemOpErr);
    const auto got = b.take(2);
    EXPECT_EQ(got[0].status, soft_roce() ? WcStatus::LocQpOpErr : WcStatus::LocProtErr);
    EXPECT_EQ(got[1].status, WcStatus::WrFlushErr);
}

TEST_P(VerbsReceive, AReceiverThatIsNotReadyIsAskedAgain) {
    for (const WrOpcode opcode : {WrOpcode::Send, WrOpcode::RdmaWriteWithImm}) {
        Side a(near());
        Side b(far());
        connect(*a.qp, *b.qp);
        a.fill(3);
        const SendWr requests[] = {a.request(opcode, b, 50000, 1),
                                   a.request(WrOpcode::RdmaWrite, b, 10, 2, 0, 60000)};
        ASSERT_EQ(a.qp->post_send(requests), 2U);
        // Where we ask again ourselves, the queue says when to poll; a NIC does it silently.
        WorkCompletion wc;
        std::set<Deadline> asked_at;
        const Deadline limit = soft() ? soon() : Clock::now() + std::chrono::milliseconds(30);
        while (asked_at.size() < 4 && Clock::now() < limit) {
            ASSERT_EQ(a.cq->poll({&wc, 1}), 0U);
            if (a.cq->next_deadline() != Deadline::max()) asked_at.insert(a.cq->next_deadline());
        }
        EXPECT_EQ(asked_at.size(), soft() ? 4U : 0U);
        const RecvWr recv = b.receive(7, 50000);
        b.qp->post_recv({&recv, 1});
        const auto done = a.take(2);
        EXPECT_EQ(done[0].status, WcStatus::Success);
        EXPECT_EQ(done[0].wr_id, 1U);
        EXPECT_EQ(done[1].wr_id, 2U);
        EXPECT_EQ(b.take_one().byte_len, 50000U);
        EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), 50000), 0);
        EXPECT_EQ(a.cq->next_deadline(), Deadline::max());
    }
}

TEST_P(VerbsReceive, AReceiverThatStaysNotReadyFailsTheRequestAfterItsRetries) {
    QpInit init = Side::defaults();
    init.rnr_retry = 3;
    init.min_rnr_timer = 14;  // 1.28 ms
    Side a(near(), 1 << 20, init);
    Side b(far(), 1 << 20, init);
    connect(*a.qp, *b.qp);
    const auto start = Clock::now();
    const SendWr requests[] = {a.request(WrOpcode::Send, b, 10, 1),
                               a.request(WrOpcode::RdmaWrite, b, 10, 2)};
    a.qp->post_send(requests);
    const auto done = a.take(2);
    EXPECT_EQ(done[0].status, WcStatus::RnrRetryExcErr);
    EXPECT_EQ(done[1].status, WcStatus::WrFlushErr);
    EXPECT_GE(Clock::now() - start, 3 * std::chrono::microseconds(1280));
}

TEST_P(VerbsReceive, TheReceiveQueueHoldsNoMoreThanItWasMadeFor) {
    QpInit init = Side::defaults();
    init.max_recv_wr = 2;
    Side b(far(), 1 << 20, init);
    const RecvWr receives[] = {b.receive(1), b.receive(2)};
    b.qp->post_recv(receives);
    EXPECT_THROW(b.qp->post_recv({receives, 1}), NativeError);
}

}  // namespace
}  // namespace aioflagcx::verbs
