#include "verbs/ibverbs/completion_queue.h"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>

#include "common/error.h"
#include "verbs/ibverbs/queue_pair.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// Entries taken by one ibv_poll_cq(3).
constexpr std::size_t kPollBatch = 64;
// Channel events acknowledged at once: each acknowledgement takes a lock (ibv_ack_cq_events(3)).
constexpr unsigned kAckBatch = 64;

ibv_comp_channel* create_channel(ibv_context* context) {
    ibv_comp_channel* const channel = Library::get().create_comp_channel(context);
    if (channel == nullptr) throw NativeError("ibv_create_comp_channel", errno, "");
    const int flags = ::fcntl(channel->fd, F_GETFL);
    ::fcntl(channel->fd, F_SETFL, flags | O_NONBLOCK);
    ::fcntl(channel->fd, F_SETFD, FD_CLOEXEC);
    return channel;
}

}  // namespace

IbvCompletionQueue::IbvCompletionQueue(std::shared_ptr<ibv_context> context, std::uint32_t max_cqe)
    : context_(std::move(context)),
      channel_(create_channel(context_.get())),
      cq_(Library::get().create_cq(context_.get(), static_cast<int>(max_cqe), nullptr,
                                   channel_.get(), 0)),
      room_(max_cqe),
      polled_(kPollBatch) {
    if (!cq_) throw NativeError("ibv_create_cq", errno, std::to_string(max_cqe) + " entries");
}

IbvCompletionQueue::~IbvCompletionQueue() {
    disarm();
    // Destroying it waits for every event that was taken to be acknowledged.
    if (unacked_ != 0) Library::get().ack_cq_events(cq_.get(), unacked_);
}

std::size_t IbvCompletionQueue::take_pending(std::span<WorkCompletion> out) {
    const std::size_t count = std::min(out.size(), pending_.size());
    const auto end = pending_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(pending_.begin(), end, out.begin());
    pending_.erase(pending_.begin(), end);
    return count;
}

// A queue pair's completions end with it. Another one that got its number has none here yet: the
// device is asked for more only when nothing is pending.
void IbvCompletionQueue::drop_removed() {
    const std::lock_guard lock(mutex_);
    for (const std::uint32_t num : removed_) {
        std::erase_if(pending_, [num](const auto& completion) { return completion.qp_num == num; });
    }
    removed_.clear();
}

std::size_t IbvCompletionQueue::poll(std::span<WorkCompletion> out) {
    if (!pending_.empty()) {
        drop_removed();
        if (!pending_.empty()) return take_pending(out);
    }
    const int wanted = static_cast<int>(std::min(out.size(), polled_.size()));
    const int count = ibv_poll_cq(cq_.get(), wanted, polled_.data());
    // Below 0: the device is gone. Its queue pairs hear of that by its events.
    const std::lock_guard lock(mutex_);
    removed_.clear();  // nothing is pending
    for (int i = 0; i < count; ++i) {
        const ibv_wc& wc = polled_[static_cast<std::size_t>(i)];
        const auto found = qps_.find(wc.qp_num);
        if (found != qps_.end()) found->second->complete(wc, pending_);
    }
    if (count < wanted && left_behind_ != 0) {
        release(left_behind_);
        left_behind_ = 0;
    }
    return take_pending(out);
}

void IbvCompletionQueue::arm() {
    // Fails only when the device is gone, and then no completion comes that it could tell of.
    ibv_req_notify_cq(cq_.get(), 0);
}

void IbvCompletionQueue::disarm() {
    ibv_cq* cq = nullptr;
    void* unused = nullptr;
    while (Library::get().get_cq_event(channel_.get(), &cq, &unused) == 0) ++unacked_;
    if (unacked_ >= kAckBatch) {
        Library::get().ack_cq_events(cq_.get(), unacked_);
        unacked_ = 0;
    }
}

std::uint32_t IbvCompletionQueue::reserve(std::uint32_t wanted) noexcept {
    std::uint32_t room = room_.load(std::memory_order_relaxed);
    std::uint32_t taken = 0;
    do {
        taken = std::min(room, wanted);
    } while (!room_.compare_exchange_weak(room, room - taken, std::memory_order_relaxed));
    return taken;
}

void IbvCompletionQueue::release(std::uint32_t count) noexcept {
    room_.fetch_add(count, std::memory_order_relaxed);
}

void IbvCompletionQueue::add(IbvQueuePair& qp) {
    const std::lock_guard lock(mutex_);
    qps_[qp.num()] = &qp;
}

void IbvCompletionQueue::remove(const IbvQueuePair& qp) {
    const std::lock_guard lock(mutex_);
    const auto found = qps_.find(qp.num());
    // Once it has been destroyed, its number may be another one's.
    if (found == qps_.end() || found->second != &qp) return;
    qps_.erase(found);
    removed_.push_back(qp.num());
}

void IbvCompletionQueue::leave(std::uint32_t outstanding) {
    const std::lock_guard lock(mutex_);
    left_behind_ += outstanding;
}

}  // namespace aioflagcx::verbs::ibverbs
