// What is taken away stays untouched: regions, responders, initiators and whole devices may go at
// any moment.
#include <algorithm>
#include <atomic>

#include "verbs_fixture.h"

namespace aioflagcx::verbs {
namespace {

// Posts requests of 64 KiB over and over on its own thread until one fails.
class Stream {
  public:
    Stream(Side& a, const Side& b, WrOpcode opcode)
        : a_(a), request_(a.request(opcode, b, 65536)), thread_([this] { run(); }) {}
    ~Stream() { wait(); }

    void await_progress(std::uint64_t count) const {
        const Deadline deadline = soon();
        const std::uint64_t target = done_ + count;
        while (done_ < target && Clock::now() < deadline) std::this_thread::yield();
        EXPECT_GE(done_, target);
    }
    // Until every request has completed.
    void wait() {
        if (thread_.joinable()) thread_.join();
    }
    WcStatus reason() const { return reason_; }

  private:
    void run() {
        const std::uint64_t piece = request_.sge.length;
        const std::size_t pieces = a_.buffer.size() / piece;
        std::uint64_t posted = 0;
        std::uint64_t next = 0;
        const Deadline deadline = soon();
        while ((reason_ == WcStatus::Success || next < posted) && Clock::now() < deadline) {
            if (reason_ == WcStatus::Success && posted - next < 256) {
                const std::uint64_t at = posted % pieces * piece;
                SendWr wr = request_;
                if (wr.opcode == WrOpcode::RdmaWrite) {
                    a_.buffer[at] = std::uint8_t(posted / pieces);
                }
                wr.wr_id = posted;
                wr.sge.addr += at;
                wr.remote_addr += at;
                posted += a_.qp->post_send({&wr, 1});
            }
            WorkCompletion out[32];
            const std::size_t count = a_.cq->poll(out);
            for (std::size_t i = 0; i < count; ++i) {
                EXPECT_EQ(out[i].wr_id, next++);
                if (out[i].status == WcStatus::Success) {
                    EXPECT_EQ(reason_, WcStatus::Success);
                    ++done_;
                } else if (out[i].status != WcStatus::WrFlushErr) {
                    EXPECT_EQ(reason_, WcStatus::Success);
                    reason_ = out[i].status;
                }
            }
        }
        EXPECT_EQ(next, posted) << "requests never completed";
    }

    Side& a_;
    const SendWr request_;  // made at the start: its keys outlive their regions
    std::atomic<std::uint64_t> done_{0};
    std::atomic<WcStatus> reason_{WcStatus::Success};
    std::thread thread_;
};

class VerbsLifetime : public OnDevices {
  protected:
    // Of which each ends at another moment. A QP whose peer is gone takes its time to fail.
    std::size_t rounds() const { return soft() ? 10 : 4; }
};
VERBS_ON_EVERY_DEVICE(VerbsLifetime);

TEST_P(VerbsLifetime, NoByteChangesAfterTheTargetsRegionIsRevoked) {
    for (std::uint64_t round = 0; round < rounds(); ++round) {
        Side a(near(), 4 << 20);
        Side b(far(), 4 << 20);
        connect(*a.qp, *b.qp);
        Stream stream(a, b, WrOpcode::RdmaWrite);
        stream.await_progress(100 + 37 * round);
        ASSERT_TRUE(b.mr->revoke(soon()));
        b.mr.reset();
        const auto snapshot = b.buffer;
        stream.wait();
        EXPECT_EQ(stream.reason(), WcStatus::RemAccessErr);
        EXPECT_EQ(b.buffer, snapshot);
    }
}

TEST_P(VerbsLifetime, NoByteChangesAfterTheResponderIsFenced) {
    for (std::uint64_t round = 0; round < rounds(); ++round) {
        Side a(near(), 4 << 20);
        Side b(far(), 4 << 20);
        connect(*a.qp, *b.qp);
        Stream stream(a, b, WrOpcode::RdmaWrite);
        stream.await_progress(100 + 37 * round);
        b.qp->fence(soon());
        const auto snapshot = b.buffer;
        stream.wait();
        EXPECT_EQ(stream.reason(), WcStatus::RetryExcErr);
        EXPECT_EQ(b.qp->state(), QpState::Err);
        EXPECT_EQ(b.buffer, snapshot);
    }
}

TEST_P(VerbsLifetime, NoByteChangesAfterTheResponderIsDestroyed) {
    for (std::uint64_t round = 0; round < rounds(); ++round) {
        Side a(near(), 4 << 20);
        Side b(far(), 4 << 20);
        connect(*a.qp, *b.qp);
        Stream stream(a, b, WrOpcode::RdmaWrite);
        stream.await_progress(100 + 37 * round);
        // Destroying does not wait for another process, fencing does.
        if (local()) {
            ASSERT_TRUE(b.qp->fence(soon()));
        }
        b.qp.reset();
        const auto snapshot = b.buffer;
        stream.wait();
        EXPECT_EQ(stream.reason(), WcStatus::RetryExcErr);
        EXPECT_EQ(b.buffer, snapshot);
    }
}

TEST_P(VerbsLifetime, NoByteChangesAfterTheReadersRegionIsDestroyed) {
    for (std::uint64_t round = 0; round < rounds(); ++round) {
        Side a(near(), 4 << 20);
        Side b(far(), 4 << 20);
        connect(*a.qp, *b.qp);
        b.fill(1);
        std::atomic<std::uint64_t> done{0};
        const SendWr wr = a.request(WrOpcode::RdmaRead, b, 65536);
        std::thread worker([&] {
            WorkCompletion wc;
            const Deadline deadline = soon();
            while (Clock::now() < deadline) {
                a.qp->post_send({&wr, 1});
                if (a.cq->poll({&wc, 1}) == 0) continue;
                if (wc.status == WcStatus::Success) ++done;
                // Older requests on other streams are flushed before the one at fault.
                if (wc.status == WcStatus::LocProtErr) break;
            }
            EXPECT_EQ(wc.status, WcStatus::LocProtErr);
        });
        while (done < 37 * round) std::this_thread::yield();
        a.mr.reset();
        const auto snapshot = a.buffer;
        worker.join();
        EXPECT_EQ(a.buffer, snapshot);
    }
}

TEST_P(VerbsLifetime, NoByteChangesAfterReadsAreFlushed) {
    for (std::size_t round = 0; round < rounds(); ++round) {
        Side a(near(), 32 << 20);
        Side b(far(), 32 << 20);
        connect(*a.qp, *b.qp);
        b.fill(2);
        std::vector<SendWr> requests;
        for (std::uint64_t i = 0; i < 64; ++i) {
            requests.push_back(a.request(WrOpcode::RdmaRead, b, 500000, i, i * 500000, i * 500000));
        }
        ASSERT_EQ(a.qp->post_send(requests), requests.size());
        const std::size_t before = a.take(round * 2).size();
        a.qp->to_error();
        a.take(64 - before);
        const auto snapshot = a.buffer;
        // What the responder had still to send would come before what others read now.
        Side c(near());
        auto responder = b.make_qp();
        connect(*c.qp, *responder);
        for (std::uint64_t i = 0; i < 16; ++i) {
            const SendWr wr = c.request(WrOpcode::RdmaRead, b, 65536, i);
            ASSERT_EQ(c.qp->post_send({&wr, 1}), 1U);
        }
        std::vector<WorkCompletion> done;
        const Deadline deadline = soon();
        while (done.size() < 16 && Clock::now() < deadline) {
            WorkCompletion wc;
            if (c.cq->poll({&wc, 1}) == 1) done.push_back(wc);
            EXPECT_TRUE(a.quiet());  // and makes what progress there is
        }
        EXPECT_EQ(done.size(), 16U);
        if (soft()) {  // where it learns of the end
            while (b.qp->state() != QpState::Err && Clock::now() < deadline) a.quiet();
            EXPECT_EQ(b.qp->state(), QpState::Err);
        }
        EXPECT_EQ(a.buffer, snapshot);
    }
}

TEST_P(VerbsLifetime, APeersWholeDeviceMayGoInTheMiddle) {
    for (std::uint64_t round = 0; round < rounds(); ++round) {
        const WrOpcode opcode = round % 2 == 0 ? WrOpcode::RdmaWrite : WrOpcode::RdmaRead;
        Side a(near(), 4 << 20);
        Side b(far(), 4 << 20);
        connect(*a.qp, *b.qp);
        Stream stream(a, b, opcode);
        stream.await_progress(100 + 37 * round);
        b.qp.reset();
        b.cq.reset();
        b.device.reset();
        stream.wait();
        EXPECT_EQ(stream.reason(), WcStatus::RetryExcErr);
    }
}

TEST_P(VerbsLifetime, AnInitiatorMayGoInTheMiddle) {
    for (std::size_t round = 0; round < rounds(); ++round) {
        Side a(near(), 32 << 20);
        Side b(far(), 32 << 20);
        connect(*a.qp, *b.qp);
        std::vector<SendWr> requests(32, a.request(WrOpcode::RdmaWrite, b, 1 << 20));
        a.qp->post_send(requests);
        a.take(round);
        a.qp.reset();
        EXPECT_TRUE(a.quiet()) << "completions of a destroyed QP";
        // Others go on.
        a.qp = a.make_qp();
        auto responder = b.make_qp();
        connect(*a.qp, *responder);
        a.qp->post_send({requests.data(), 1});
        EXPECT_EQ(a.take_one().status, WcStatus::Success);
    }
}

TEST_P(VerbsLifetime, WhatIsPostedAfterThePeersEndFails) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    const SendWr requests[] = {a.request(WrOpcode::RdmaWrite, b, 10, 1),
                               a.request(WrOpcode::RdmaWrite, b, 10, 2)};
    b.qp.reset();
    a.qp->post_send(requests);
    const auto done = a.take(2);
    EXPECT_EQ(done[0].status, WcStatus::RetryExcErr);
    EXPECT_EQ(done[1].status, WcStatus::WrFlushErr);
}

TEST_P(VerbsLifetime, WhatIsPostedWithoutItsRegionFails) {
    Side a(near());
    Side b(far());
    connect(*a.qp, *b.qp);
    const std::vector<SendWr> requests(2, a.request(WrOpcode::RdmaWrite, b, 4096));
    a.qp->post_send({requests.data(), 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    a.mr.reset();
    a.qp->post_send(requests);
    const auto done = a.take(2);
    EXPECT_EQ(done[0].status, soft_roce() ? WcStatus::LocQpOpErr : WcStatus::LocProtErr);
    EXPECT_EQ(done[1].status, WcStatus::WrFlushErr);
}

}  // namespace
}  // namespace aioflagcx::verbs
