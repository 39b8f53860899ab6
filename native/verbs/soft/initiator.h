// The initiator's side of a connected queue pair: what both paths share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "verbs/soft/completion_queue.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/send_queue.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

// How long "receiver not ready" asks to wait: InfiniBand's encoding of min_rnr_timer, 5 bits
// (InfiniBand Architecture Specification, volume 1, "RNR NAK timer field encoding").
Clock::duration rnr_delay(std::uint8_t min_rnr_timer) noexcept;

// Public functions take the send CQ's progress mutex; protected ones run under it. Derived
// classes call detach() in their destructor, before their own parts go.
class Initiator : public Pollable {
  public:
    struct Init {
        SoftCompletionQueue* cq = nullptr;
        std::uint32_t qp_num = 0;
        std::uint32_t max_send_wr = 0;
        std::uint8_t rnr_retry = 7;
        std::shared_ptr<const MrTable> mrs;
    };

    std::size_t post(std::span<const SendWr> requests);
    bool try_now(const SendWr& wr);
    void to_error();
    bool in_error() const noexcept { return error_.load(std::memory_order_acquire); }

    void progress(Clock::time_point now) final;
    Deadline deadline() const noexcept final { return resume_at_; }

  protected:
    explicit Initiator(const Init& init);

    // Starts what may start and moves what is started.
    virtual void pump() = 0;
    // QueuePair::try_now() of a request that is right on this side, with an empty queue.
    virtual bool execute_now(const SendWr&) { return false; }
    // Takes in what the peer sent; before pump() of the same poll().
    virtual void receive() {}
    // Leaves the path: local memory is not touched after it.
    virtual void close_path() noexcept = 0;

    void detach() noexcept;  // from the CQ, with close_path(); requests vanish unreported

    // To ERR because of request `seq`; nothing happens if already there.
    void fail(std::uint64_t seq, WcStatus status, int error = 0);
    // To ERR because of the peer or the path to it, which the oldest outstanding request tells (of
    // an idle QP, the next one posted).
    void fail_oldest(WcStatus status, int error);
    // The request that was started alone met a receiver that was not ready.
    void not_ready(std::uint8_t min_rnr_timer);
    bool waiting() const noexcept { return resume_at_ != Deadline::max(); }

    SoftCompletionQueue& cq_;
    SendQueue queue_;
    MrCache mrs_;

  private:
    void enter_error() noexcept;

    const std::uint32_t qp_num_;
    const std::uint8_t rnr_retry_;
    std::uint8_t rnr_left_;
    std::uint64_t rnr_seq_ = 0;  // the request rnr_left_ counts for
    Deadline resume_at_ = Deadline::max();
    // Written under the progress mutex; read by state() on any thread.
    std::atomic<bool> error_{false};
    // An idle QP lost its peer: the next request posted tells so, with this errno.
    bool lost_idle_ = false;
    int lost_errno_ = 0;
};

}  // namespace aioflagcx::verbs::soft
