// Requests that must not be carried out fail with verbs' status, move the QP to ERR and flush the
// rest, in posting order.
#include <algorithm>

#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
namespace {

class SoftError : public OnPath {
  protected:
    // Posts good, bad, good, good; expects success, `status` and flushes.
    static void expect_failure(Side& a, Side& b, const SendWr& bad, WcStatus status) {
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
        // Every later request is taken and flushed.
        std::vector<SendWr> later(5000, requests[0]);
        EXPECT_EQ(a.qp->post_send(later), later.size());
        for (const auto& wc : a.take(later.size())) ASSERT_EQ(wc.status, WcStatus::WrFlushErr);
    }
};
SOFT_ON_EVERY_PATH(SoftError);

TEST_P(SoftError, UnknownRkeyIsARemoteAccessError) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.rkey ^= 1;
    expect_failure(a, b, wr, WcStatus::RemAccessErr);
    // On the local path it learns of it by the end of the connection.
    const Deadline deadline = soon();
    while (b.qp->state() != QpState::Err && Clock::now() < deadline) std::this_thread::yield();
    EXPECT_EQ(b.qp->state(), QpState::Err);
}

TEST_P(SoftError, OneByteOutsideTheRegionIsARemoteAccessError) {
    for (const WrOpcode opcode :
         {WrOpcode::RdmaWrite, WrOpcode::RdmaRead, WrOpcode::RdmaWriteWithImm}) {
        for (const bool below : {false, true}) {
            Side a(options());
            Side b(options());
            connect(*a.qp, *b.qp);
            SendWr wr = a.request(opcode, b, 100);
            wr.remote_addr += below ? std::uint64_t(-1) : b.buffer.size() - 99;
            expect_failure(a, b, wr, WcStatus::RemAccessErr);
        }
    }
}

TEST_P(SoftError, AddressesThatWrapAroundAreRemoteAccessErrors) {
    for (const std::uint64_t addr : {std::uint64_t{0}, ~std::uint64_t{0}, ~std::uint64_t{0} - 99}) {
        Side a(options());
        Side b(options());
        connect(*a.qp, *b.qp);
        SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
        wr.remote_addr = addr;
        expect_failure(a, b, wr, WcStatus::RemAccessErr);
    }
}

TEST_P(SoftError, WritingWithoutRemoteWriteAccessIsARemoteAccessError) {
    Side a(options());
    Side b(options());
    Side c(options(), 1 << 20, Side::defaults(), kAccessRemoteRead | kAccessLocalWrite);
    connect(*a.qp, *c.qp);
    SendWr read = a.request(WrOpcode::RdmaRead, c, 100);
    a.qp->post_send({&read, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    SendWr write = a.request(WrOpcode::RdmaWrite, c, 100);
    a.qp->post_send({&write, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::RemAccessErr);
}

TEST_P(SoftError, ReadingWithoutRemoteReadAccessIsARemoteAccessError) {
    Side a(options());
    Side c(options(), 1 << 20, Side::defaults(), kAccessRemoteWrite | kAccessLocalWrite);
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

TEST_P(SoftError, AKeyOfAnotherProtectionDomainIsARemoteAccessError) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    auto other = b.device->alloc_pd();
    auto mr = other->register_memory(address(b.buffer.data()), b.buffer.size(), kAllAccess, {});
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.rkey = mr->rkey();
    expect_failure(a, b, wr, WcStatus::RemAccessErr);
}

TEST_P(SoftError, BadLocalKeysAndBoundsAreLocalProtectionErrors) {
    for (int what = 0; what < 3; ++what) {
        Side a(options());
        Side b(options());
        connect(*a.qp, *b.qp);
        SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
        if (what == 0) wr.sge.lkey ^= 1;
        if (what == 1) wr.sge.addr += a.buffer.size() - 99;
        if (what == 2) wr.sge.addr = ~std::uint64_t{0};
        expect_failure(a, b, wr, WcStatus::LocProtErr);
    }
}

TEST_P(SoftError, ReadingIntoMemoryWithoutLocalWriteIsALocalProtectionError) {
    Side a(options(), 1 << 20, Side::defaults(), kAccessRemoteRead);
    Side b(options());
    connect(*a.qp, *b.qp);
    expect_failure(a, b, a.request(WrOpcode::RdmaRead, b, 100), WcStatus::LocProtErr);
}

TEST_P(SoftError, ALocalErrorLetsTheRequestsBeforeItFinish) {
    Side a(options(), 8 << 20);
    Side b(options(), 8 << 20);
    connect(*a.qp, *b.qp);
    a.fill(2);
    std::vector<SendWr> requests;
    for (std::uint64_t i = 0; i < 100; ++i) {
        requests.push_back(a.request(WrOpcode::RdmaWrite, b, 65536, i, i * 65536, i * 65536));
    }
    requests.push_back(requests[0]);
    requests.back().sge.lkey ^= 1;
    requests.push_back(requests[0]);
    a.qp->post_send(requests);
    const auto done = a.take(102);
    for (std::size_t i = 0; i < 100; ++i) EXPECT_EQ(done[i].status, WcStatus::Success);
    EXPECT_EQ(done[100].status, WcStatus::LocProtErr);
    EXPECT_EQ(done[101].status, WcStatus::WrFlushErr);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), 100 * 65536), 0);
}

TEST_P(SoftError, ARemoteErrorAmongManyFlushesInPostingOrder) {
    Side a(options(3), 32 << 20);
    Side b(options(3), 32 << 20);
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

TEST_P(SoftError, ZeroLengthRequestsNeedNoKeys) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    SendWr wr;
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
}

TEST_P(SoftError, AnUnknownOpcodeIsALocalOperationError) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.opcode = static_cast<WrOpcode>(77);
    expect_failure(a, b, wr, WcStatus::LocQpOpErr);
}

TEST_P(SoftError, ToErrorFlushesWhatIsOutstandingAndReceives) {
    Side a(options(), 64 << 20);
    Side b(options(), 64 << 20);
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

TEST_P(SoftError, PostingBeforeConnectingThrows) {
    Side a(options());
    SendWr wr;
    EXPECT_THROW(a.qp->post_send({&wr, 1}), NativeError);
    Side b(options());
    b.qp->accept(a.qp->local_attributes());
    EXPECT_THROW(b.qp->post_send({&wr, 1}), NativeError);
}

TEST(SoftMemory, WhatCannotBeUsedIsNotRegistered) {
    auto device = open_soft_device({});
    auto pd = device->alloc_pd();
    std::vector<std::uint8_t> buffer(100);
    const std::uint64_t here = address(buffer.data());
    EXPECT_THROW(pd->register_memory(here, 0, kAllAccess, {}), NativeError);
    EXPECT_THROW(pd->register_memory(here, ~std::uint64_t{0}, kAllAccess, {}), NativeError);
    EXPECT_THROW(pd->register_memory(0, 4096, kAllAccess, {}), NativeError);
    EXPECT_THROW(pd->register_memory(here, 100, kAccessRemoteWrite, {}), NativeError);
    EXPECT_THROW(pd->register_memory(here, 100, 1U << 20, {}), NativeError);
    static const std::uint8_t constant[64] = {1};
    EXPECT_THROW(pd->register_memory(address(constant), 64, kAllAccess, {}), NativeError);
    EXPECT_NO_THROW(pd->register_memory(address(constant), 64, kAccessRemoteRead, {}));
}

TEST(SoftMemory, KeysAreNeverZeroAndNotReusedSoon) {
    auto device = open_soft_device({});
    auto pd = device->alloc_pd();
    std::vector<std::uint8_t> buffer(100);
    std::vector<std::uint32_t> keys;
    for (int i = 0; i < 10000; ++i) {
        const auto mr = pd->register_memory(address(buffer.data()), 100, kAllAccess, {});
        EXPECT_NE(mr->rkey(), 0U);
        keys.push_back(mr->rkey());
    }
    std::sort(keys.begin(), keys.end());
    EXPECT_EQ(std::unique(keys.begin(), keys.end()), keys.end());
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
