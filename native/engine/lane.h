// One initiator queue pair at work: takes slices from its session's queue within its credit,
// posts them as work requests, hands completions back.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/epoch.h"
#include "engine/rail_counters.h"
#include "engine/transfer_task.h"
#include "engine/worker.h"

namespace aioflagcx::engine {

class RdmaContext;
class TransferQueue;

struct LaneLimits {
    std::uint32_t max_wr = 0;  // send queue depth
    std::uint64_t max_inflight_bytes = 0;
    std::uint32_t batch = 0;  // requests posted per round
};

// Belongs to its worker's thread, except where noted.
class Lane final : public CompletionSink, public std::enable_shared_from_this<Lane> {
  public:
    // How the owner (Session) hears of it; called on the worker's thread.
    struct Hooks {
        std::function<void(Lane&, const verbs::WorkCompletion&)> failed;  // first real error
        std::function<void(Lane&)> aborted;  // a task whose slices it holds is to end
        std::function<void(Lane&)> flushed;  // killed, and nothing is posted any more
    };

    Lane(const RdmaContext& context, Worker& worker, TransferQueue& queue, LaneLimits limits,
         std::uint32_t local_device, std::uint32_t remote_device, Epoch epoch, std::string rail,
         RailCounters::Counter bytes);
    ~Lane() override;

    void set_queue_pair(std::unique_ptr<verbs::QueuePair> qp) {
        const std::lock_guard lock(qp_mutex_);
        qp_ = std::move(qp);
        qp_num_.store(qp_->num());
    }
    void set_hooks(Hooks hooks) { hooks_ = std::move(hooks); }
    void destroy_queue_pair() noexcept;

    // Any thread; constant.
    Worker& worker() noexcept { return worker_; }
    const std::string& rail() const noexcept { return rail_; }
    const Epoch& epoch() const noexcept { return epoch_; }
    std::uint32_t local_device() const noexcept { return local_device_; }
    std::uint32_t qp_num() const noexcept { return qp_num_.load(); }
    // Bytes that have been moved.
    void count(std::uint64_t bytes) noexcept {
        bytes_->fetch_add(bytes, std::memory_order_relaxed);
    }
    void wake() { worker_.wake(shared_from_this()); }

    // Any thread. Carries the pieces out on the caller's, if that takes no waiting. False: they are
    // to be queued; some of them may have been copied.
    bool try_now(Op op, const Pieces& pieces, const RemoteTable& remote);

    // Worker's thread. The queue pair goes to ERR; `flushed` follows once it is empty.
    void kill();
    // `aborted` follows if slices of `task` are posted. As long as any are, `flushed` is to come,
    // and its owner is there.
    void abort(const TransferTask& task);

    void on_completion(std::uint32_t slot, const verbs::WorkCompletion& wc) override;
    bool serve() override;

    // Tasks whose closing request goes out on this lane; guarded by the TransferQueue's mutex.
    std::deque<std::shared_ptr<TransferTask>> closing;
    // Bytes, guarded likewise; halved now and then, see TransferQueue::window().
    std::uint64_t completed_lately = 0;

  private:
    verbs::SendWr request_for(const Slice& slice, std::uint32_t slot) const;
    verbs::SendWr closing_request(const TransferTask& task) const;
    verbs::SendWr request_for(Op op, const Piece& piece, const RemoteTable& table) const;
    void end_slot(std::uint32_t slot, const verbs::WorkCompletion& wc);
    void fail(const verbs::WorkCompletion& wc);
    void check_flushed();

    const RdmaContext& context_;
    Worker& worker_;
    TransferQueue& queue_;
    const LaneLimits limits_;
    const std::uint32_t local_device_;
    const std::uint32_t remote_device_;
    const Epoch epoch_;
    const std::string rail_;
    const RailCounters::Counter bytes_;
    // Held by try_now(), and while the queue pair is created, killed or destroyed; the worker alone
    // reads qp_ without it. Nothing is taken inside but the device's own locks.
    std::mutex qp_mutex_;
    std::unique_ptr<verbs::QueuePair> qp_;
    std::atomic<std::uint32_t> qp_num_{0};  // of the last there was
    Hooks hooks_;

    std::vector<Slice> slots_;         // posted, by the lower half of wr_id
    std::vector<std::uint32_t> free_;  // slots
    std::vector<Slice> taken_;         // scratch of serve()
    std::vector<verbs::SendWr> requests_;
    std::uint64_t inflight_bytes_ = 0;
    bool killed_ = false;
    bool failed_ = false;
    bool unusable_ = false;  // a call on the queue pair failed: it is destroyed instead of flushed
};

}  // namespace aioflagcx::engine
