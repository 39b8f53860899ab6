// All transfers of one session: who is next, what is out, when one is finished. Lanes (queue
// pairs) pull slices from here, so a rail takes as much as it has room for, and a failed rail's
// slices go to whoever pulls next.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include "engine/epoch.h"
#include "engine/lane.h"
#include "engine/transfer_task.h"
#include "verbs/types.h"

namespace aioflagcx::engine {

// Why an epoch's queue pairs failed.
struct Cause {
    verbs::WcStatus status = verbs::WcStatus::Success;  // Success: moved to ERR by ourselves
    std::uint32_t vendor_err = 0;
    std::string rail;

    // The path is at fault, not one request: whoever was on it has used up a try.
    bool transport() const noexcept;
    std::string name() const {
        return status == verbs::WcStatus::Success ? "" : verbs::wc_status_name(status);
    }
};

// Lock: mutex_ guards all members, every task's guarded members, and Lane::closing of
// attached lanes. Held while waking workers and pushing events (their locks are leaves); taken
// after Session's mutex, never before it.
class TransferQueue {
  public:
    TransferQueue(EventRing& ring, Stats& stats, std::uint32_t slice_size,
                  std::uint32_t retry_count)
        : ring_(ring), stats_(stats), slice_size_(slice_size), retry_count_(retry_count) {}

    // False once lost, and for a task whose waiter was taken back. A task without data and
    // immediate finishes at once.
    bool submit(const std::shared_ptr<TransferTask>& task);

    // A lane that has nothing of any transfer to do, or null.
    std::shared_ptr<Lane> idle_lane();
    // A transfer that was carried out without being queued.
    void done_now(Op op, std::uint64_t bytes) noexcept;

    // Up to `max_count` slices for `lane`, which has `inflight` bytes outstanding and may have
    // `limit`; round robin over tasks by slice. A lane that has none takes one, however large.
    void take(Lane& lane, std::vector<Slice>& out, std::size_t max_count, std::uint64_t limit,
              std::uint64_t inflight);
    // Slices the queue pair did not take.
    void give_back(Lane& lane, std::vector<Slice>& slices, std::size_t from);

    void completed(Lane& lane, Slice slice, const verbs::WorkCompletion& wc);

    void attach(const std::shared_ptr<Lane>& lane);
    void detach(Lane& lane);
    // It is flushed: nothing of it completes any more.
    void forget(const Lane& lane);

    // All lanes of `epoch` are flushed.
    void epoch_down(const Epoch& epoch, const Cause& cause);
    // The peer has confirmed that `epoch` can write no more.
    void fenced(const Epoch& epoch);

    void cancel(TransferTask& task);
    // From now on the ring tells how the waiter's task ends, or has done so already. Null when it
    // has landed, or was not submitted, which is refused from now on.
    std::shared_ptr<TransferTask> take_back(Waiter& waiter);
    // Nothing can be transferred any more.
    void lose();

  private:
    using Task = std::shared_ptr<TransferTask>;
    struct EpochState {
        std::size_t lanes = 0;
        bool fenced = false;
    };

    Slice cut(const Task& task);
    void make_runnable(const Task& task);
    void drop(TransferTask& task, TransferEvent why);
    void start_closing(const Task& task);
    void maybe_finish(const Task& task);
    void finish(const Task& task);
    void unknown_outcome(const Task& task, Slice slice, const Lane& lane);
    bool attached(const Lane& lane) const;
    bool tries_left(const TransferTask& task, std::uint32_t rail) const;
    bool tries_left_elsewhere(const TransferTask& task) const;
    bool may_carry(const Lane& lane, const TransferTask& task) const;
    bool may_take_next(const Lane& lane, const TransferTask& task) const;
    std::uint64_t window(const Lane& lane, std::uint64_t limit) const;
    void count_completed(Lane& lane, std::uint64_t bytes);
    void lanes_changed();
    void wake_lanes();
    std::vector<Task> all_tasks() const;

    EventRing& ring_;
    Stats& stats_;
    const std::uint32_t slice_size_;
    const std::uint32_t retry_count_;

    std::mutex mutex_;
    std::unordered_map<TransferTask*, Task> tasks_;  // not finished
    std::deque<Task> runnable_;                      // with slices to post
    std::vector<std::shared_ptr<Lane>> lanes_;       // attached
    std::map<Epoch, EpochState> epochs_;             // with lanes that are not flushed
    bool several_rails_ = false;                     // have lanes that are attached
    bool one_woken_ = false;                         // of the lanes, for all that is runnable
    std::size_t turn_ = 0;  // of the lanes that small transfers are left to
    bool lost_ = false;
};

}  // namespace aioflagcx::engine
