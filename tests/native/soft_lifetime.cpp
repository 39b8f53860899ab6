// What is taken away stays untouched: regions, responders, initiators and whole devices may go at
// any moment.
#include <algorithm>
#include <atomic>

#include "soft_fixture.h"

namespace aioflagcx::verbs::soft {
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

class SoftLifetime : public OnPath {};
SOFT_ON_EVERY_PATH(SoftLifetime);

TEST_P(SoftLifetime, NoByteChangesAfterTheTargetsRegionIsRevoked) {
    for (std::uint64_t round = 0; round < 10; ++round) {
        Side a(options(), 4 << 20);
        Side b(options(), 4 << 20);
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

TEST_P(SoftLifetime, NoByteChangesAfterTheResponderIsFenced) {
    for (std::uint64_t round = 0; round < 10; ++round) {
        Side a(options(), 4 << 20);
        Side b(options(), 4 << 20);
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

TEST_P(SoftLifetime, NoByteChangesAfterTheResponderIsDestroyed) {
    for (std::uint64_t round = 0; round < 10; ++round) {
        Side a(options(), 4 << 20);
        Side b(options(), 4 << 20);
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

TEST_P(SoftLifetime, NoByteChangesAfterTheReadersRegionIsDestroyed) {
    for (std::uint64_t round = 0; round < 10; ++round) {
        Side a(options(), 4 << 20);
        Side b(options(), 4 << 20);
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

TEST_P(SoftLifetime, NoByteChangesAfterReadsAreFlushed) {
    for (std::size_t round = 0; round < 10; ++round) {
        Side a(options(), 32 << 20);
        Side b(options(), 32 << 20);
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
        // The responder is done with it when its QP has seen the end.
        const Deadline deadline = soon();
        while (b.qp->state() != QpState::Err && Clock::now() < deadline) a.quiet();
        EXPECT_EQ(b.qp->state(), QpState::Err);
        EXPECT_TRUE(a.quiet());
        EXPECT_EQ(a.buffer, snapshot);
    }
}

TEST_P(SoftLifetime, APeersWholeDeviceMayGoInTheMiddle) {
    for (std::uint64_t round = 0; round < 10; ++round) {
        const WrOpcode opcode = round % 2 == 0 ? WrOpcode::RdmaWrite : WrOpcode::RdmaRead;
        Side a(options(), 4 << 20);
        Side b(options(), 4 << 20);
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

TEST_P(SoftLifetime, AnInitiatorMayGoInTheMiddle) {
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
        EXPECT_TRUE(a.quiet()) << "completions of a destroyed QP";
        // The responder learns it and gives its receives back.
        const WorkCompletion wc = b.take_one();
        EXPECT_EQ(wc.wr_id, 5U);
        EXPECT_EQ(wc.status, WcStatus::WrFlushErr);
        EXPECT_EQ(b.qp->state(), QpState::Err);
    }
}

TEST_P(SoftLifetime, AnIdleInitiatorLearnsOfItsPeersEndWithTheNextPost) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    b.qp.reset();
    if (tcp()) {
        const Deadline deadline = soon();
        while (a.qp->state() != QpState::Err && Clock::now() < deadline) EXPECT_TRUE(a.quiet());
        EXPECT_EQ(a.qp->state(), QpState::Err);
    }
    const SendWr requests[] = {a.request(WrOpcode::RdmaWrite, b, 10, 1),
                               a.request(WrOpcode::RdmaWrite, b, 10, 2)};
    a.qp->post_send(requests);
    const auto done = a.take(2);
    EXPECT_EQ(done[0].status, WcStatus::RetryExcErr);
    EXPECT_EQ(done[1].status, WcStatus::WrFlushErr);
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
