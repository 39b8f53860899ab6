#include "engine/worker.h"

#include <poll.h>

#include <algorithm>
#include <utility>

#include "common/thread.h"
#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

void cpu_relax() noexcept {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

Worker::Worker(verbs::Device& device, std::uint32_t max_cqe, std::chrono::microseconds spin,
               Stats& stats, const std::string& name)
    : spin_(spin), stats_(stats), cq_(device.create_cq(max_cqe)), completions_(kPollBatch) {
    thread_ = start_thread(name, [this] { loop(); });
}

Worker::~Worker() { stop(); }

void Worker::wake(const std::shared_ptr<CompletionSink>& sink) {
    if (sink->waking_.exchange(true)) return;  // the worker has not come to it yet
    const std::lock_guard lock(mutex_);
    waking_.push_back(sink);
    incoming_.store(true, std::memory_order_release);
    if (sleeping_) wake_.signal();
}

void Worker::run(std::function<void()> command) {
    {
        const std::lock_guard lock(mutex_);
        if (!stopped_) {
            commands_.push_back(std::move(command));
            incoming_.store(true, std::memory_order_release);
            if (sleeping_) wake_.signal();
            return;
        }
    }
    command();
}

void Worker::add(const std::shared_ptr<CompletionSink>& sink) {
    sink->sink_id_ = next_sink_.fetch_add(1);
    run([this, sink] { sinks_.emplace(sink->sink_id_, sink); });
}

void Worker::remove(CompletionSink& sink) {
    sinks_.erase(sink.sink_id_);
    std::erase_if(round_, [&](const auto& other) { return other.get() == &sink; });
}

void Worker::stop() {
    {
        const std::lock_guard lock(mutex_);
        stopping_ = true;
        incoming_.store(true, std::memory_order_release);
        if (sleeping_) wake_.signal();
    }
    if (!thread_.joinable()) return;
    thread_.join();
    std::vector<std::function<void()>> late;
    {
        const std::lock_guard lock(mutex_);
        stopped_ = true;
        late.swap(commands_);
    }
    for (const auto& command : late) command();
}

void Worker::loop() {
    bool idle = false;
    verbs::Deadline idle_since;
    for (;;) {
        bool busy = false;
        if (incoming_.load(std::memory_order_acquire)) {
            if (!take_incoming()) return;
            busy = true;
        }
        busy |= poll_completions();
        busy |= serve_round();
        if (busy) {
            idle = false;
            continue;
        }
        const auto now = verbs::Clock::now();
        if (!idle) {
            idle = true;
            idle_since = now;
        }
        if (now - idle_since < spin_) {
            cpu_relax();
            continue;
        }
        sleep();
        idle = false;
    }
}

// False: to stop; all commands have run.
bool Worker::take_incoming() {
    std::vector<std::shared_ptr<CompletionSink>> waking;
    std::vector<std::function<void()>> commands;
    bool stopping = false;
    {
        const std::lock_guard lock(mutex_);
        waking.swap(waking_);
        commands.swap(commands_);
        stopping = stopping_;
        incoming_.store(false, std::memory_order_relaxed);
    }
    for (const auto& command : commands) command();
    for (const auto& sink : waking) {
        sink->waking_.store(false);  // before serving: a later wake() must not be lost
        if (sinks_.contains(sink->sink_id_)) activate(sink);
    }
    return !stopping;
}

void Worker::activate(const std::shared_ptr<CompletionSink>& sink) {
    if (std::exchange(sink->active_, true)) return;
    round_.push_back(sink);
}

bool Worker::poll_completions() {
    const std::size_t count = cq_->poll(completions_);
    for (std::size_t i = 0; i < count; ++i) {
        const verbs::WorkCompletion& wc = completions_[i];
        const auto found = sinks_.find(static_cast<std::uint32_t>(wc.wr_id >> 32));
        if (found == sinks_.end()) continue;  // its queue pair has been destroyed
        const std::shared_ptr<CompletionSink> sink = found->second;
        sink->on_completion(static_cast<std::uint32_t>(wc.wr_id), wc);
        if (sinks_.contains(sink->sink_id_)) activate(sink);  // it has credit again
    }
    return count != 0;
}

// Every active sink once, so that none waits behind another's backlog.
bool Worker::serve_round() {
    bool posted = false;
    for (std::size_t left = round_.size(); left > 0 && !round_.empty(); --left) {
        const std::shared_ptr<CompletionSink> sink = std::move(round_.front());
        round_.pop_front();
        if (sink->serve()) {
            posted = true;
            round_.push_back(sink);
        } else {
            sink->active_ = false;
        }
    }
    return posted;
}

void Worker::sleep() {
    {
        const std::lock_guard lock(mutex_);
        if (incoming_.load(std::memory_order_relaxed)) return;
        sleeping_ = true;
    }
    cq_->arm();
    if (!poll_completions()) {
        int timeout_ms = -1;
        const verbs::Deadline deadline = cq_->next_deadline();
        if (deadline != verbs::Deadline::max()) {
            const auto left =
                std::chrono::ceil<std::chrono::milliseconds>(deadline - verbs::Clock::now());
            timeout_ms = static_cast<int>(std::max<std::int64_t>(left.count(), 0));
        }
        engine::add(stats_.worker_sleeps);
        pollfd fds[2] = {{wake_.fd(), POLLIN, 0}, {cq_->fd(), POLLIN, 0}};
        ::poll(fds, 2, timeout_ms);  // EINTR and errors alike: look again
    }
    cq_->disarm();
    const std::lock_guard lock(mutex_);
    sleeping_ = false;
    wake_.clear();
}

}  // namespace aioflagcx::engine
