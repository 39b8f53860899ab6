// A completion queue and its channel, shared by the queue pairs of one worker.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <unordered_map>
#include <vector>

#include "verbs/ibverbs/handles.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

class IbvQueuePair;

// Credit: every request posted may end in an entry of its own (in an error all of them do), so one
// is only posted when there is room for that. What a destroyed queue pair left behind keeps its
// room until the queue has been seen empty.
//
// Locks, in the order of taking: mutex_ here, then IbvQueuePair::mutex_.
class IbvCompletionQueue final : public CompletionQueue {
  public:
    IbvCompletionQueue(std::shared_ptr<ibv_context> context, std::uint32_t max_cqe);
    ~IbvCompletionQueue() override;

    std::size_t poll(std::span<WorkCompletion> out) override;
    void arm() override;
    void disarm() override;
    int fd() const noexcept override { return channel_->fd; }

    ibv_cq* get() const noexcept { return cq_.get(); }

    // Any thread. As much of `wanted` as there is room for.
    std::uint32_t reserve(std::uint32_t wanted) noexcept;
    void release(std::uint32_t count) noexcept;
    void add(IbvQueuePair& qp);
    // Its completions are of no interest any more.
    void remove(const IbvQueuePair& qp);
    // Entries that a destroyed queue pair may have left.
    void leave(std::uint32_t outstanding);

  private:
    std::size_t take_pending(std::span<WorkCompletion> out);
    void drop_removed();

    const std::shared_ptr<ibv_context> context_;
    const Handle<ibv_comp_channel> channel_;
    Handle<ibv_cq> cq_;
    std::atomic<std::uint32_t> room_;

    // The worker's own.
    std::vector<ibv_wc> polled_;
    std::deque<WorkCompletion> pending_;  // made of one entry that stands for several
    unsigned unacked_ = 0;                // channel events taken

    std::mutex mutex_;  // guards what follows; held while a queue pair takes its completion in
    std::unordered_map<std::uint32_t, IbvQueuePair*> qps_;
    std::uint32_t left_behind_ = 0;       // room of destroyed queue pairs
    std::vector<std::uint32_t> removed_;  // since the last poll
};

}  // namespace aioflagcx::verbs::ibverbs
