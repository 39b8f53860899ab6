// An initiator's send queue: requests in posting order, and their completions in the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "verbs/soft/completion_queue.h"
#include "verbs/types.h"

namespace aioflagcx::verbs::soft {

// Requests are numbered as they are posted. [head, next) are started and not yet reported,
// [next, tail) wait. Streams may finish requests in any order; they are reported in order.
// Not thread-safe: used under the completion queue's progress mutex.
class SendQueue {
  public:
    SendQueue(SoftCompletionQueue& cq, std::uint32_t qp_num, std::uint32_t capacity);

    bool full() const noexcept { return tail_ - head_ == slots_.size(); }
    bool empty() const noexcept { return head_ == tail_; }
    std::uint64_t head() const noexcept { return head_; }
    std::uint64_t next() const noexcept { return next_; }
    const SendWr& request(std::uint64_t seq) const noexcept { return slot(seq).wr; }
    WcStatus local_error(std::uint64_t seq) const noexcept { return slot(seq).local_error; }

    // A request with a local error waits for its turn and then fails, as if it had been tried.
    void push(const SendWr& wr, WcStatus local_error);

    // Whether request(next()) may start now. Sends, writes with immediate and requests with a
    // local error start alone: when all before them have been reported, and nothing after them
    // starts before they have.
    bool may_start() const noexcept;
    bool next_is_alone() const noexcept { return alone(slot(next_)); }
    void start() noexcept { ++next_; }
    void restart() noexcept { next_ = head_; }  // only when a request that starts alone is started

    void finish(std::uint64_t seq);
    // `seq` with `status`, all others flushed; the queue is empty afterwards.
    void fail(std::uint64_t seq, WcStatus status, std::uint32_t vendor_err);
    void flush() { fail(tail_, WcStatus::WrFlushErr, 0); }
    // A request that never entered the queue.
    void reject(const SendWr& wr, WcStatus status, std::uint32_t vendor_err);

    void report();  // hands the completions made since the last call to the completion queue

  private:
    struct Slot {
        SendWr wr;
        WcStatus local_error = WcStatus::Success;
        bool done = false;
    };

    static bool alone(const Slot& slot) noexcept {
        return slot.wr.opcode == WrOpcode::Send || slot.wr.opcode == WrOpcode::RdmaWriteWithImm ||
               slot.local_error != WcStatus::Success;
    }
    const Slot& slot(std::uint64_t seq) const noexcept { return slots_[seq % slots_.size()]; }
    Slot& slot(std::uint64_t seq) noexcept { return slots_[seq % slots_.size()]; }

    SoftCompletionQueue& cq_;
    const std::uint32_t qp_num_;
    std::vector<Slot> slots_;
    std::vector<WorkCompletion> completions_;
    std::uint64_t head_ = 0;
    std::uint64_t next_ = 0;
    std::uint64_t tail_ = 0;
};

}  // namespace aioflagcx::verbs::soft
