// Requests that must not be carried out fail with verbs' status, move the QP to ERR and flush the
// rest, in posting order.
#include <algorithm>

#include "verbs_fixture.h"

namespace aioflagcx::verbs {
namespace {

class VerbsError : public OnDevices {
  protected:
    // Posts good, bad, good, good; expects success, `status` and flushes.
    static void expect_failure(Side& a, Side& b, const SendWr& bad, WcStatus status) {
        const RecvWr recv = b.receive(0);  // whatever the bad one is, it need not wait
        b.qp->post_recv({&recv, 1});
        std::vector<SendWr> requests;
        for (std::uint64_t id = 0; id < 4; ++id) {
            requests.push_back(a.request(WrOpcode::RdmaWrite, b, 100, id, 0, 100 * id));
        }
        // Alone first: streams carry requests side by side, so one posted together with the bad
        // one may be cut off by it.
        ASSERT_EQ(a.qp->post_send({requests.data(), 1}), 1U);
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
        requests[1] = bad;
        requests[1].wr_id = 1;
        requests[1].signaled = false;  // errors are told nevertheless
        requests[3].signaled = false;
        ASSERT_EQ(a.qp->post_send({requests.data() + 1, 3}), 3U);
        const auto done = a.take(3);
        ASSERT_EQ(done.size(), 3U);
        for (std::size_t i = 0; i < done.size(); ++i) {
            EXPECT_EQ(done[i].wr_id, i + 1);
            EXPECT_EQ(done[i].status, i == 0 ? status : WcStatus::WrFlushErr)
                << wc_status_name(done[i].status);
        }
        EXPECT_EQ(a.qp->state(), QpState::Err);
        // Later requests are taken and flushed.
        std::vector<SendWr> later(1000, requests[0]);
        EXPECT_EQ(a.qp->post_send(later), later.size());
        for (const auto& wc : a.take(later.size())) ASSERT_EQ(wc.status, WcStatus::WrFlushErr);
    }
};
VERBS_ON_EVERY_DEVICE(VerbsError);

TEST_P(VerbsError, UnknownRkeyIsARemoteAccessError) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.rkey ^= 1;
    expect_failure(a, b, wr, WcStatus::RemAccessErr);
    // The target learns of it as well.
    EXPECT_EQ(b.take_one().status, WcStatus::WrFlushErr);
    EXPECT_EQ(b.qp->state(), QpState::Err);
}

TEST_P(VerbsError, OneByteOutsideTheRegionIsARemoteAccessError) {
    for (const WrOpcode opcode :
         {WrOpcode::RdmaWrite, WrOpcode::RdmaRead, WrOpcode::RdmaWriteWithImm}) {
        for (const bool below : {false, true}) {
            Side a(near());
            Side b(far());
            connect(*a.qp, *b.qp);
            SendWr wr = a.request(opcode, b, 100);
            wr.remote_addr += below ? std::uint64_t(-1) : b.buffer.size() - 99;
            expect_failure(a, b, wr, WcStatus::RemAccessErr);
        }
    }
}

TEST_P(VerbsError, AddressesThatWrapAroundAreRemoteAccessErrors) {
    for (const std::uint64_t addr : {std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0} - 99}) {
        Side a(near());
        Side b(far());
        connect(*a.qp, *b.qp);
        SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
        wr.remote_addr = addr;
        expect_failure(a, b, wr, WcStatus::RemAccessErr);
    }
}

TEST_P(VerbsError, WritingWithoutRemoteWriteAccessIsARemoteAccessError) {
    Side a(near());
    Side b(far());
    Side c(far(), 1 << 20, Side::defaults(), kAccessRemoteRead | kAccessLocalWrite);
    connect(*a.qp, *c.qp);
    SendWr read = a.request(WrOpcode::RdmaRead, c, 100);
    a.qp->post_send({&read, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    SendWr write = a.request(WrOpcode::RdmaWrite, c, 100);
    a.qp->post_send({&write, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::RemAccessErr);
}

TEST_P(VerbsError, ReadingWithoutRemoteReadAccessIsARemoteAccessError) {
    Side a(near());
    Side c(far(), 1 << 20, Side::defaults(), kAccessRemoteWrite | kAccessLocalWrite);
    connect(*a.qp, *c.qp);
    a.fill(1);
    const auto before = a.buffer;
    SendWr write = a.request(WrOpcode::RdmaWrite, c, 100);
    a.qp->post_send({&write, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    SendWr read = a.request(WrOpcode::RdmaRead, c, 100);
    a.qp->post_send({&read, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::RemAccessErr);
    EXPECT_EQ(a.buffer, before);
}

TEST_P(VerbsError, AKeyOfAnotherProtectionDomainIsARemoteAccessError) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    auto other = b.device->alloc_pd();
    auto mr = other->register_memory(address(b.buffer.data()), b.buffer.size(), kAllAccess, {});
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.rkey = mr->rkey();
    expect_failure(a, b, wr, WcStatus::RemAccessErr);
}

TEST_P(VerbsError, BadLocalKeysAndBoundsAreLocalProtectionErrors) {
    for (int what = 0; what < 3; ++what) {
        Side a(near());
        Side b(far());
        connect(*a.qp, *b.qp);
        SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
        if (what == 0) wr.sge.lkey ^= 1;
        if (what == 1) wr.sge.addr += a.buffer.size() - 99;
        if (what == 2) wr.sge.addr = ~std::uint64_t{0};
        // Soft-RoCE has another status for keys that it does not know.
        const bool unknown = soft_roce() && what == 0;
        expect_failure(a, b, wr, unknown ? WcStatus::LocQpOpErr : WcStatus::LocProtErr);
    }
}

TEST_P(VerbsError, ReadingIntoMemoryWithoutLocalWriteIsALocalProtectionError) {
    Side a(near(), 1 << 20, Side::defaults(), kAccessRemoteRead);
    Side b(far());
    connect(*a.qp, *b.qp);
    expect_failure(a, b, a.request(WrOpcode::RdmaRead, b, 100), WcStatus::LocProtErr);
}

TEST_P(VerbsError, ARemoteErrorAmongManyFlushesInPostingOrder) {
    Side a(near(3), 32 << 20);
    Side b(far(3), 32 << 20);
    connect(*a.qp, *b.qp);
    std::vector<SendWr> requests;
    for (std::uint64_t i = 0; i < 400; ++i) {
        requests.push_back(a.request(i % 3 == 0 ? WrOpcode::RdmaRead : WrOpcode::RdmaWrite, b,
                                     65536, i, i * 65536, i * 65536));
    }
    requests[250].rkey ^= 1;
    ASSERT_EQ(a.qp->post_send(requests), requests.size());
    const auto done = a.take(400);
    ASSERT_EQ(done.size(), 400U);
    bool failed = false;
    for (std::size_t i = 0; i < done.size(); ++i) {
        ASSERT_EQ(done[i].wr_id, i);
        if (done[i].status == WcStatus::Success) {
            ASSERT_FALSE(failed) << "success after a failure";
            continue;
        }
        failed = true;
        ASSERT_EQ(done[i].status, i == 250 ? WcStatus::RemAccessErr : WcStatus::WrFlushErr)
            << i << ": " << wc_status_name(done[i].status);
    }
    EXPECT_TRUE(failed);
}

TEST_P(VerbsError, ZeroLengthRequestsNeedNoKeys) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    SendWr wr;
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
}

TEST_P(VerbsError, ToErrorFlushesWhatIsOutstandingAndReceives) {
    Side a(near(), 64 << 20);
    Side b(far(), 64 << 20);
    connect(*a.qp, *b.qp);
    const RecvWr recv = a.receive(77);
    a.qp->post_recv({&recv, 1});
    std::vector<SendWr> requests(64, a.request(WrOpcode::RdmaWrite, b, 1 << 20));
    a.qp->post_send(requests);
    a.qp->to_error();
    a.qp->to_error();
    EXPECT_EQ(a.qp->state(), QpState::Err);
    std::size_t flushed_receives = 0;
    for (const auto& wc : a.take(65)) {
        if (wc.wr_id == 77) {
            EXPECT_EQ(wc.status, WcStatus::WrFlushErr);
            ++flushed_receives;
        } else {
            EXPECT_TRUE(wc.status == WcStatus::Success || wc.status == WcStatus::WrFlushErr);
        }
    }
    EXPECT_EQ(flushed_receives, 1U);
    EXPECT_TRUE(a.quiet());
}

TEST_P(VerbsError, PostingBeforeConnectingThrows) {
    Side a(near());
    SendWr wr;
    EXPECT_THROW(a.qp->post_send({&wr, 1}), NativeError);
}

class VerbsMemory : public OnDevices {};
VERBS_ON_EVERY_DEVICE(VerbsMemory);

TEST_P(VerbsMemory, WhatCannotBeUsedIsNotRegistered) {
    auto device = near();
    auto pd = device->alloc_pd();
    std::vector<std::uint8_t> buffer(100);
    const std::uint64_t here = address(buffer.data());
    EXPECT_THROW(pd->register_memory(here, ~std::uint64_t{0}, kAllAccess, {}), NativeError);
    EXPECT_THROW(pd->register_memory(0, 4096, kAllAccess, {}), NativeError);
    static const std::uint8_t constant[64] = {1};
    EXPECT_THROW(pd->register_memory(address(constant), 64, kAllAccess, {}), NativeError);
    EXPECT_NO_THROW(pd->register_memory(address(constant), 64, kAccessRemoteRead, {}));
}

}  // namespace
}  // namespace aioflagcx::verbs
