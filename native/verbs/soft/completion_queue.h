// The soft device's CompletionQueue: a software queue, and the place that drives initiators.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <mutex>
#include <span>
#include <vector>

#include "common/event_fd.h"
#include "common/unique_fd.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

class SoftCompletionQueue;

// An initiator that makes progress inside poll(). All of it runs under progress_mutex().
class Pollable {
  public:
    virtual ~Pollable() = default;
    virtual void progress(Clock::time_point now) = 0;
    // When progress() must run even if no socket is ready.
    virtual Deadline deadline() const noexcept = 0;

  private:
    friend class SoftCompletionQueue;
    bool ready_ = false;  // in the queue's ready list
};

// A socket whose edge-triggered events poll() collects; on_events() only notes them.
class EventSink {
  public:
    virtual ~EventSink() = default;
    virtual void on_events(std::uint32_t events) noexcept = 0;
};

// The initiators' side has no thread: their sockets are in this queue's epoll set, and poll()
// drives them. Responders, on any thread, only push completions.
//
// Locks, in the order of taking: progress_mutex(), then (inside push() and arm()) queue_mutex_.
class SoftCompletionQueue final : public CompletionQueue {
  public:
    explicit SoftCompletionQueue(std::uint32_t max_cqe);

    std::size_t poll(std::span<WorkCompletion> out) override;
    void arm() override;
    void disarm() override;
    int fd() const noexcept override { return epoll_.get(); }
    Deadline next_deadline() const noexcept override;

    // Any thread.
    void push(std::span<const WorkCompletion> completions);
    bool full() const noexcept { return queued_.load(std::memory_order_relaxed) >= max_cqe_; }
    void discard(std::uint32_t qp_num);  // a destroyed QP's completions go with it

    // Guards every initiator of this queue, its streams included. The worker holds it nearly
    // always; connect() and destruction on other threads are what it keeps out.
    std::mutex& progress_mutex() noexcept { return progress_mutex_; }

    // The rest only under progress_mutex().
    void watch(int fd, EventSink& sink);
    void unwatch(int fd) noexcept;
    void mark_ready(Pollable& pollable);    // the next poll() calls its progress()
    void update_timer(Pollable& pollable);  // its deadline() may have changed
    void forget(Pollable& pollable) noexcept;

  private:
    void drive();
    void collect_events();
    void collect_timers(Clock::time_point now);
    void update_busy() noexcept;
    void wake_if_armed();

    const std::uint32_t max_cqe_;
    UniqueFd epoll_;
    EventFd wake_;

    std::mutex progress_mutex_;
    std::size_t watched_ = 0;
    std::vector<Pollable*> ready_;
    std::vector<Pollable*> running_;  // the part of ready_ that drive() is working on
    std::vector<Pollable*> timed_;
    // Written under progress_mutex_. Whether poll() has anybody to drive: a hint that saves the
    // lock and the system call; a change made by another thread may be seen one poll() later,
    // and wakes a sleeper.
    std::atomic<bool> busy_{false};
    // Written under progress_mutex_, read by next_deadline(): the earliest of timed_.
    std::atomic<Clock::rep> earliest_;

    std::mutex queue_mutex_;  // guards queue_, armed_ and signaled_; innermost
    std::deque<WorkCompletion> queue_;
    bool armed_ = false;
    bool signaled_ = false;
    // Size of queue_; written under queue_mutex_, read without it as a hint.
    std::atomic<std::size_t> queued_{0};
};

}  // namespace aioflagcx::verbs::soft
