// A QP's posted receives.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "verbs/soft/completion_queue.h"
#include "verbs/types.h"

namespace aioflagcx::verbs::soft {

// Posted by the owner's worker, taken by whoever carries out the peer's requests.
class ReceiveQueue {
  public:
    // A posted receive that a request is using.
    struct Taken {
        std::uint64_t ticket;
        RecvWr wr;
    };

    ReceiveQueue(SoftCompletionQueue& cq, std::uint32_t qp_num, std::uint32_t capacity) noexcept
        : cq_(cq), qp_num_(qp_num), capacity_(capacity) {}

    // Throws NativeError (ENOMEM) when the queue would hold more than its capacity; then none of
    // `requests` is posted. After flush() they complete with WR_FLUSH_ERR at once.
    void post(std::span<const RecvWr> requests);

    std::optional<Taken> take();
    // Completes a taken receive; wr_id and qp_num are filled in. Does nothing after flush(), which
    // has completed it.
    void complete(std::uint64_t ticket, WorkCompletion wc);

    // For good; afterwards only post() uses the completion queue.
    void flush();

  private:
    WorkCompletion flushed(const RecvWr& wr) const noexcept;

    SoftCompletionQueue& cq_;
    const std::uint32_t qp_num_;
    const std::uint32_t capacity_;

    // Guards what follows, and the order of pushes to the completion queue, whose queue mutex is
    // the only lock taken inside.
    std::mutex mutex_;
    std::deque<RecvWr> posted_;
    std::vector<Taken> taken_;  // in the order taken; hardly ever more than one
    std::uint64_t next_ticket_ = 0;
    bool flushed_ = false;
};

}  // namespace aioflagcx::verbs::soft
