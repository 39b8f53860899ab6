// A soft device that is taken away: what its queue pairs, its peers' and its listeners do then, and
// that it can come back.
#include <atomic>
#include <cerrno>
#include <functional>
#include <thread>

#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
namespace {

class SoftPlug : public OnPath {
  protected:
    static void expect_gone(const std::function<void()>& call) {
        try {
            call();
            ADD_FAILURE() << "the device is there";
        } catch (const NativeError& error) {
            EXPECT_EQ(error.error(), ENODEV) << error.what();
            EXPECT_NE(error.detail().find("soft0 is gone"), std::string::npos) << error.what();
        }
    }
    static void expect_write(Side& a, Side& b) {
        const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 4096);
        ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
    }
};
SOFT_ON_EVERY_PATH(SoftPlug);

TEST_P(SoftPlug, WithoutItsDeviceAQueuePairIsInErrAndNoOtherComesAbout) {
    Side a(options());
    Side b(options());
    const auto unused = b.make_qp();
    connect(*a.qp, *b.qp);
    expect_write(a, b);
    unplug(*b.device);
    EXPECT_EQ(b.qp->state(), QpState::Err);
    EXPECT_EQ(unused->state(), QpState::Err);
    expect_gone([&] { b.make_qp(); });
    const auto other = a.make_qp();
    expect_gone([&] { unused->accept(other->local_attributes()); });
    expect_gone([&] { unused->connect(other->local_attributes(), soon()); });
    unplug(*b.device);  // it is gone already
}

TEST_P(SoftPlug, ThePeerLosesItsQueuePair) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    unplug(*b.device);
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 4096);
    ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
    EXPECT_NE(a.take_one().status, WcStatus::Success);
    EXPECT_EQ(a.qp->state(), QpState::Err);
}

TEST_P(SoftPlug, TheInitiatorsOwnRequestsAreFlushed) {
    Side a(options());
    Side b(options(), 1 << 20);
    connect(*a.qp, *b.qp);
    unplug(*a.device);
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 4096);
    ASSERT_EQ(a.qp->post_send({&wr, 1}), 1U);
    EXPECT_EQ(a.take_one().status, WcStatus::WrFlushErr);
    expect_gone([&] { a.make_qp(); });
}

TEST_P(SoftPlug, NobodyListensAnyMore) {
    Side a(options());
    Side b(options());
    b.qp->accept(a.qp->local_attributes());
    const Attributes accepted = b.qp->local_attributes();
    unplug(*b.device);
    EXPECT_THROW(a.qp->connect(accepted, soon()), NativeError);
}

TEST_P(SoftPlug, ADeviceThatIsBackWorks) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    for (Side* const side : {&a, &b}) {
        unplug(*side->device);
        plug(*side->device);
        plug(*side->device);
        EXPECT_EQ(side->qp->state(), QpState::Err);
        a.qp = a.make_qp();
        b.qp = b.make_qp();
        connect(*a.qp, *b.qp);
        expect_write(a, b);  // by the keys of before
    }
}

TEST_P(SoftPlug, NoByteChangesAfterTheTargetIsUnpluggedAndFenced) {
    for (int round = 0; round < 10; ++round) {
        Side a(options());
        Side b(options());
        connect(*a.qp, *b.qp);
        a.fill(static_cast<std::uint32_t>(round + 1));
        std::atomic<bool> stop{false};
        std::thread worker([&] {
            WorkCompletion out[64];
            while (!stop.load()) {
                const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 1 << 20);
                a.qp->post_send({&wr, 1});
                a.cq->poll(out);
            }
        });
        std::this_thread::sleep_for(std::chrono::milliseconds(round));
        unplug(*b.device);
        EXPECT_TRUE(b.qp->fence(soon()));
        std::fill(b.buffer.begin(), b.buffer.end(), std::uint8_t{0xA5});
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        EXPECT_TRUE(std::all_of(b.buffer.begin(), b.buffer.end(),
                                [](std::uint8_t byte) { return byte == 0xA5; }));
        stop.store(true);
        worker.join();
    }
}

TEST_P(SoftPlug, QueuePairsMayComeAndGoMeanwhile) {
    Side a(options());
    Side b(options());
    std::atomic<int> connected{0};
    std::atomic<bool> stop{false};
    std::thread worker([&] {
        while (!stop.load()) {
            try {
                const auto initiator = a.make_qp();
                const auto responder = b.make_qp();
                connect(*initiator, *responder);
                ++connected;
            } catch (const NativeError&) {
                // Whatever it was in the middle of.
            }
        }
    });
    for (int round = 0; round < 50; ++round) {
        Side& side = round % 2 == 0 ? a : b;
        unplug(*side.device);
        plug(*side.device);
        const int before = connected.load();
        while (connected.load() == before) std::this_thread::yield();
    }
    stop.store(true);
    worker.join();
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
