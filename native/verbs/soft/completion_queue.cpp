#include "verbs/soft/completion_queue.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>

#include "common/error.h"
#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft {

SoftCompletionQueue::SoftCompletionQueue(std::uint32_t max_cqe)
    : max_cqe_(max_cqe),
      epoll_(::epoll_create1(EPOLL_CLOEXEC)),
      earliest_(Deadline::max().time_since_epoch().count()) {
    if (max_cqe == 0 || max_cqe > kMaxCqe) throw NativeError("create_cq", EINVAL, "max_cqe");
    if (!epoll_) throw NativeError("epoll_create1", errno, "");
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;  // no sink: disarm() takes the signal back
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.fd(), &event) != 0) {
        throw NativeError("epoll_ctl", errno, "");
    }
}

std::size_t SoftCompletionQueue::poll(std::span<WorkCompletion> out) {
    if (busy_.load(std::memory_order_acquire)) drive();
    if (queued_.load(std::memory_order_acquire) == 0) return 0;
    const std::lock_guard lock(queue_mutex_);
    const std::size_t count = std::min(out.size(), queue_.size());
    const auto end = queue_.begin() + static_cast<std::ptrdiff_t>(count);
    std::copy(queue_.begin(), end, out.begin());
    queue_.erase(queue_.begin(), end);
    queued_.store(queue_.size(), std::memory_order_release);
    return count;
}

void SoftCompletionQueue::arm() {
    const std::lock_guard lock(queue_mutex_);
    armed_ = true;
}

void SoftCompletionQueue::disarm() {
    const std::lock_guard lock(queue_mutex_);
    armed_ = false;
    if (signaled_) wake_.clear();
    signaled_ = false;
}

Deadline SoftCompletionQueue::next_deadline() const noexcept {
    return Deadline(Clock::duration(earliest_.load(std::memory_order_acquire)));
}

void SoftCompletionQueue::push(std::span<const WorkCompletion> completions) {
    if (completions.empty()) return;
    const std::lock_guard lock(queue_mutex_);
    queue_.insert(queue_.end(), completions.begin(), completions.end());
    queued_.store(queue_.size(), std::memory_order_release);
    if (armed_) {
        armed_ = false;  // one signal wakes the sleeper for all that follow
        signaled_ = true;
        wake_.signal();
    }
}

void SoftCompletionQueue::discard(std::uint32_t qp_num) {
    const std::lock_guard lock(queue_mutex_);
    std::erase_if(queue_, [qp_num](const WorkCompletion& wc) { return wc.qp_num == qp_num; });
    queued_.store(queue_.size(), std::memory_order_release);
}

void SoftCompletionQueue::wake_if_armed() {
    const std::lock_guard lock(queue_mutex_);
    if (!armed_) return;
    armed_ = false;
    signaled_ = true;
    wake_.signal();
}

void SoftCompletionQueue::watch(int fd, EventSink& sink) {
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET;
    event.data.ptr = &sink;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw NativeError("epoll_ctl", errno, "");
    }
    ++watched_;
    update_busy();
}

void SoftCompletionQueue::unwatch(int fd) noexcept {
    // Not left to close(): a fork()ed child may hold a copy, which would keep the entry alive.
    epoll_event unused{};
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &unused) == 0) --watched_;
    update_busy();
}

void SoftCompletionQueue::mark_ready(Pollable& pollable) {
    if (pollable.ready_) return;
    ready_.push_back(&pollable);
    pollable.ready_ = true;
    update_busy();
    wake_if_armed();
}

void SoftCompletionQueue::update_timer(Pollable& pollable) {
    const bool wanted = pollable.deadline() != Deadline::max();
    const auto found = std::find(timed_.begin(), timed_.end(), &pollable);
    if (wanted && found == timed_.end()) timed_.push_back(&pollable);
    if (!wanted && found != timed_.end()) timed_.erase(found);
    Deadline earliest = Deadline::max();
    for (const Pollable* timed : timed_) earliest = std::min(earliest, timed->deadline());
    earliest_.store(earliest.time_since_epoch().count(), std::memory_order_release);
    update_busy();
}

void SoftCompletionQueue::forget(Pollable& pollable) noexcept {
    std::erase(ready_, &pollable);
    std::erase(timed_, &pollable);
    pollable.ready_ = false;
    Deadline earliest = Deadline::max();
    for (const Pollable* timed : timed_) earliest = std::min(earliest, timed->deadline());
    earliest_.store(earliest.time_since_epoch().count(), std::memory_order_release);
    update_busy();
}

void SoftCompletionQueue::update_busy() noexcept {
    busy_.store(watched_ > 0 || !ready_.empty() || !timed_.empty(), std::memory_order_release);
}

void SoftCompletionQueue::drive() {
    const std::lock_guard lock(progress_mutex_);
    if (watched_ > 0) collect_events();
    Clock::time_point now{};
    if (!timed_.empty() || !ready_.empty()) now = Clock::now();
    if (!timed_.empty()) collect_timers(now);
    running_.swap(ready_);
    for (Pollable* pollable : running_) pollable->ready_ = false;
    for (Pollable* pollable : running_) pollable->progress(now);
    running_.clear();
    update_busy();
}

void SoftCompletionQueue::collect_events() {
    std::array<epoll_event, kEventsAtOnce> events;
    const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsAtOnce, 0);
    for (int i = 0; i < count; ++i) {
        auto* sink = static_cast<EventSink*>(events[static_cast<std::size_t>(i)].data.ptr);
        if (sink != nullptr) sink->on_events(events[static_cast<std::size_t>(i)].events);
    }
}

void SoftCompletionQueue::collect_timers(Clock::time_point now) {
    for (Pollable* pollable : timed_) {
        if (pollable->deadline() <= now) mark_ready(*pollable);
    }
}

}  // namespace aioflagcx::verbs::soft
