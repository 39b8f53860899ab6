// What becomes of the receives of a soft device.
#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
namespace {

class SoftReceive : public OnPath {};
SOFT_ON_EVERY_PATH(SoftReceive);

TEST_P(SoftReceive, FencingFlushesPostedReceivesOnce) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    const RecvWr receives[] = {b.receive(1), b.receive(2), b.receive(3)};
    b.qp->post_recv(receives);
    b.qp->fence(soon());
    b.qp->fence(soon());
    const auto got = b.take(3);
    for (std::size_t i = 0; i < got.size(); ++i) {
        EXPECT_EQ(got[i].wr_id, i + 1);
        EXPECT_EQ(got[i].status, WcStatus::WrFlushErr);
    }
    b.qp->post_recv({receives, 1});
    EXPECT_EQ(b.take_one().status, WcStatus::WrFlushErr);
    EXPECT_TRUE(b.quiet());
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
