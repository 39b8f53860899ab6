// One native thread that drives queue pairs: posts what their sessions have, polls one CQ,
// sleeps when there is nothing to do.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/event_fd.h"
#include "engine/stats.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

// Something whose queue pair completes on a worker's CQ. Called on the worker's thread only.
class CompletionSink {
  public:
    virtual ~CompletionSink() = default;
    virtual void on_completion(std::uint32_t slot, const verbs::WorkCompletion& wc) = 0;

    // Post what there is, within credit and one round's batch. False: parked until woken or
    // until one of its completions comes.
    virtual bool serve() = 0;

    // wr_id of a request of this sink: the worker finds the sink by the upper half.
    std::uint64_t wr_id(std::uint32_t slot) const noexcept {
        return (std::uint64_t{sink_id_} << 32) | slot;
    }

  private:
    friend class Worker;
    std::uint32_t sink_id_ = 0;        // set once by Worker::add
    std::atomic<bool> waking_{false};  // in the worker's incoming list
    bool active_ = false;              // worker's thread only: in its round
};

// Lock: mutex_ guards the incoming lists, `sleeping_`, `stopping_` and `stopped_`; a leaf.
// Everything else is the thread's own.
class Worker {
  public:
    Worker(verbs::Device& device, std::uint32_t max_cqe, std::chrono::microseconds spin,
           Stats& stats, const std::string& name);
    ~Worker();  // stop()

    verbs::CompletionQueue& cq() noexcept { return *cq_; }

    // Any thread. `sink` is served soon; it must have been added.
    void wake(const std::shared_ptr<CompletionSink>& sink);

    // Any thread. Runs on the worker's thread, in order; once that has ended, on the caller's or
    // on the one that calls stop().
    void run(std::function<void()> command);

    void add(const std::shared_ptr<CompletionSink>& sink);  // any thread
    void remove(CompletionSink& sink);                      // worker's thread

    void stop();  // any thread but the worker's; idempotent

  private:
    void loop();
    bool take_incoming();
    bool poll_completions();
    bool serve_round();
    void activate(const std::shared_ptr<CompletionSink>& sink);
    void sleep();

    const std::chrono::microseconds spin_;
    Stats& stats_;
    std::unique_ptr<verbs::CompletionQueue> cq_;
    EventFd wake_;

    std::mutex mutex_;
    std::vector<std::shared_ptr<CompletionSink>> waking_;
    std::vector<std::function<void()>> commands_;
    bool sleeping_ = false;
    bool stopping_ = false;
    bool stopped_ = false;               // the thread has ended
    std::atomic<bool> incoming_{false};  // hint: the lists may hold something

    std::atomic<std::uint32_t> next_sink_{1};
    std::unordered_map<std::uint32_t, std::shared_ptr<CompletionSink>> sinks_;
    std::deque<std::shared_ptr<CompletionSink>> round_;
    std::vector<verbs::WorkCompletion> completions_;

    std::thread thread_;
};

}  // namespace aioflagcx::engine
