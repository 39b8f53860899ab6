// The states of queue pairs that find each other, and the two ends' roles.
#include "verbs_fixture.h"

namespace aioflagcx::verbs {
namespace {

class VerbsConnect : public OnDevices {};
VERBS_ON_EVERY_DEVICE(VerbsConnect);

TEST_P(VerbsConnect, StatesFollowTheHandshake) {
    Side a(near());
    Side b(far());
    EXPECT_EQ(a.qp->state(), QpState::Init);
    b.qp->accept(a.qp->local_attributes());
    EXPECT_EQ(b.qp->state(), QpState::Rts);
    a.qp->connect(b.qp->local_attributes(), soon());
    EXPECT_EQ(a.qp->state(), QpState::Rts);
    EXPECT_THROW(a.qp->connect(b.qp->local_attributes(), soon()), NativeError);
    EXPECT_THROW(b.qp->accept(a.qp->local_attributes()), NativeError);
}

TEST_P(VerbsConnect, AnErrorInInitEndsTheQp) {
    Side a(near());
    Side b(far());
    a.qp->to_error();
    EXPECT_EQ(a.qp->state(), QpState::Err);
    b.qp->fence(soon());
    EXPECT_THROW(b.qp->accept(a.qp->local_attributes()), NativeError);
    SendWr wr;
    EXPECT_EQ(a.qp->post_send({&wr, 1}), 1U);
    EXPECT_EQ(a.take_one().status, WcStatus::WrFlushErr);
}

}  // namespace
}  // namespace aioflagcx::verbs
