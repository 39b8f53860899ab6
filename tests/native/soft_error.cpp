// What is refused by the soft device and where; other devices differ in that.
#include <algorithm>

#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
namespace {

class SoftError : public OnPath {};
SOFT_ON_EVERY_PATH(SoftError);

TEST_P(SoftError, AnUnknownOpcodeIsALocalOperationError) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100);
    wr.opcode = static_cast<WrOpcode>(77);
    ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
    EXPECT_EQ(a.take_one().status, WcStatus::LocQpOpErr);
    EXPECT_EQ(a.qp->state(), QpState::Err);
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

TEST_P(SoftError, AResponderPostsNoRequests) {
    Side a(options());
    Side b(options());
    b.qp->accept(a.qp->local_attributes());
    SendWr wr;
    EXPECT_THROW(b.qp->post_send({&wr, 1}), NativeError);
}

TEST(SoftMemory, NoBytesAndContradictoryAccessAreRefused) {
    auto device = open_soft_device({});
    auto pd = device->alloc_pd();
    std::vector<std::uint8_t> buffer(100);
    const std::uint64_t here = address(buffer.data());
    EXPECT_THROW(pd->register_memory(here, 0, kAllAccess, {}), NativeError);
    EXPECT_THROW(pd->register_memory(here, 100, kAccessRemoteWrite, {}), NativeError);
    EXPECT_THROW(pd->register_memory(here, 100, 1U << 20, {}), NativeError);
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
