// The initiator's side of one control connection: its endpoints, its transfers, the peer's table.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/lane.h"
#include "engine/remote_table.h"
#include "engine/transfer_queue.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

class TransferEngine;

// The queue pairs of one rail, as a state machine: Down -> (prepare, establish) -> Up ->
// (error or abort) -> Failing -> (all flushed) -> Down. `attempt` is its epoch: slices, causes
// and fences name it, so nothing of an old epoch is mistaken for the new one's.
struct Endpoint {
    enum class State : std::uint8_t { Down, Up, Failing };

    std::uint32_t device = 0;  // index of the local device
    State state = State::Down;
    std::uint64_t attempt = 0;
    Cause cause;
    std::string rail;                          // "local->remote" device names, of the attempt
    std::vector<std::shared_ptr<Lane>> lanes;  // not yet flushed
};

// Lock: mutex_ guards everything declared below it. Order: mutex_, then TransferQueue's, then the
// leaves (Worker, EventRing, LocalTable). Lanes call back on worker threads holding nothing.
class Session : public std::enable_shared_from_this<Session> {
  public:
    Session(std::shared_ptr<TransferEngine> engine, std::uint64_t id, std::string peer);
    ~Session();  // close()

    std::uint64_t id() const noexcept { return id_; }

    std::vector<verbs::Attributes> prepare(std::uint64_t attempt);
    std::string establish(std::uint64_t attempt, const std::vector<verbs::Attributes>& remote,
                          verbs::Deadline deadline);
    void watch(const std::string& host, std::uint16_t port, const std::vector<std::uint8_t>& token);

    bool update_table(bool full, std::uint64_t base, std::uint64_t generation,
                      std::span<const std::uint8_t> table, std::span<const std::uint8_t> removed);
    std::shared_ptr<const RemoteTable> table();
    std::uint64_t generation();

    // The request is spent unless this throws. std::invalid_argument if it is already. Null when
    // the transfer is done: `now` asks for that where it takes no waiting and little time. With a
    // waiter, success opens it instead of being reported.
    std::shared_ptr<TransferTask> submit(Request& request, std::uint64_t id, std::uint32_t imm,
                                         bool now = false,
                                         std::shared_ptr<Waiter> waiter = nullptr);
    std::shared_ptr<TransferTask> take_back(Waiter& waiter) { return queue_.take_back(waiter); }
    void cancel(TransferTask& task) { queue_.cancel(task); }
    void abort(const std::shared_ptr<TransferTask>& task);
    void fenced(std::uint64_t attempt) { queue_.fenced(attempt); }

    void fail();
    void close();

  private:
    struct Prepared {
        std::size_t endpoint = 0;
        Worker* worker = nullptr;
        std::unique_ptr<verbs::QueuePair> qp;
    };

    static void destroy(std::vector<Prepared> prepared);
    void lane_failed(Lane& lane, const verbs::WorkCompletion& wc);
    void lane_aborted(Lane& lane);
    void lane_flushed(Lane& lane);
    Endpoint* endpoint_of(const Lane& lane);
    void fail_endpoint(Endpoint& endpoint);

    const std::shared_ptr<TransferEngine> engine_;
    const std::uint64_t id_;
    const std::string peer_;
    TransferQueue queue_;

    std::mutex mutex_;
    std::condition_variable flushed_;  // an endpoint went Down
    std::vector<Endpoint> endpoints_;  // one per local device
    std::uint64_t prepared_attempt_ = 0;
    std::vector<Prepared> prepared_;
    std::shared_ptr<const RemoteTable> table_;
    bool lost_ = false;
    bool counted_ = true;  // in Stats::sessions, until closed
};

}  // namespace aioflagcx::engine
