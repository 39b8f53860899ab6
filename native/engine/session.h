// The initiator's side of one control connection: its endpoints, its transfers, the peer's table.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/lane.h"
#include "engine/rail_matching.h"
#include "engine/remote_table.h"
#include "engine/transfer_queue.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

class RdmaContext;
class TransferEngine;

// A queue pair that is not connected yet.
struct Prepared {
    Worker* worker = nullptr;
    std::unique_ptr<verbs::QueuePair> qp;
};

// The queue pairs of one rail, as a state machine: Down -> (prepare, establish) -> Up ->
// (error or abort) -> Failing -> (all flushed) -> Down. Slices, causes and fences name the epoch,
// so nothing of an old one is mistaken for the new one's, nor one rail's for another's.
struct Endpoint {
    enum class State : std::uint8_t { Down, Up, Failing };

    std::string local;  // our device's name; constant
    State state = State::Down;
    Epoch epoch;
    Cause cause;
    std::string rail;                          // "local->remote" device names; empty: not known yet
    std::vector<std::shared_ptr<Lane>> lanes;  // not yet flushed
    std::uint64_t prepared_attempt = 0;
    std::vector<Prepared> prepared;
};

// Lock: mutex_ guards everything declared below it. Order: mutex_, then TransferQueue's, then the
// leaves (Worker, EventRing, LocalTable). Lanes call back on worker threads holding nothing.
class Session : public std::enable_shared_from_this<Session> {
  public:
    Session(std::shared_ptr<TransferEngine> engine, std::uint64_t id, std::string peer);
    ~Session();  // close()

    std::uint64_t id() const noexcept { return id_; }

    // What the peer says of its devices (name, kind, subnet), by which the rails are made: see
    // match_devices(). Before any other call; without it there is one rail for each of our devices,
    // to one of the peer's choice. NativeError for what makes no sense.
    void meet(const std::vector<verbs::Attributes>& devices);

    std::uint32_t rails();
    std::string rail_name(std::uint32_t rail);
    std::uint32_t local_device(std::uint32_t rail);

    // Of a rail that is down. One rail's calls must not run side by side; different ones' may.
    std::vector<verbs::Attributes> prepare(std::uint64_t attempt, std::uint32_t rail);
    std::string establish(std::uint64_t attempt, std::uint32_t rail,
                          const std::vector<verbs::Attributes>& remote, verbs::Deadline deadline);
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
    void fenced(const Epoch& epoch) { queue_.fenced(epoch); }

    // One of our devices is of no use any more.
    void device_failed(std::uint32_t device);
    // The same of one of its queue pairs, which may be none of ours.
    void queue_pair_failed(std::uint32_t device, std::uint32_t qp_num);
    void fail();
    void close();

  private:
    static void destroy(std::vector<Prepared> prepared);
    void set_pairs(std::vector<DevicePair> pairs);
    Endpoint& endpoint(std::uint32_t rail, const char* call);
    std::vector<std::shared_ptr<Lane>> connect_lanes(std::uint64_t attempt, std::uint32_t rail,
                                                     std::vector<Prepared>& prepared,
                                                     const std::vector<verbs::Attributes>& remote,
                                                     verbs::Deadline deadline);
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
    std::vector<DevicePair> pairs_;    // by rail
    std::vector<Endpoint> endpoints_;  // by rail
    std::vector<std::string> theirs_;  // what the peer calls its devices; empty: it has not said
    std::shared_ptr<const RemoteTable> table_;
    bool lost_ = false;
    bool counted_ = true;  // in Stats::sessions, until closed
};

}  // namespace aioflagcx::engine
