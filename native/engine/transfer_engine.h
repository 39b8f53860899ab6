// One engine's native half: devices, regions, sessions, responders, threads.
#pragma once

#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "engine/event_ring.h"
#include "engine/liveness.h"
#include "engine/local_table.h"
#include "engine/options.h"
#include "engine/rail_counters.h"
#include "engine/rdma_context.h"
#include "engine/stats.h"

namespace aioflagcx::engine {

class Session;
class Responder;

// Lifetime: sessions and responders hold the engine; close() closes them first, then frees the
// regions, then joins the workers and frees the devices. Handles that outlive close() find their
// session lost or their responder closed and touch no device. No call that uses devices may run
// beside close(): the owner of the engine sees to that.
//
// Lock: mutex_ guards the registries and `closed_`; held for no call into anything else.
class TransferEngine : public std::enable_shared_from_this<TransferEngine> {
  public:
    // One rail per device; at least one. Made by this, so that a forked child frees nothing.
    static std::shared_ptr<TransferEngine> open(
        EngineOptions options, std::vector<std::unique_ptr<verbs::Device>> devices);
    TransferEngine(EngineOptions options, std::vector<std::unique_ptr<verbs::Device>> devices);
    ~TransferEngine();

    // The ids of regions that a stopped peer is still inside of; their memory must stay where it is
    // until this process ends. Later calls return nothing.
    std::vector<std::uint64_t> close();
    // Whether this is a forked child's copy: its threads are not here, so closing is nothing.
    bool forked() const noexcept { return ::getpid() != pid_; }
    bool closed() const noexcept { return closed_.load(); }
    void check_open() const;  // throws NativeError once closed

    const EngineOptions& options() const noexcept { return options_; }
    Stats& stats() noexcept { return stats_; }
    RailCounters& rail_counters() noexcept { return rail_counters_; }
    EventRing& ring() noexcept { return ring_; }
    Liveness& liveness() noexcept { return *liveness_; }
    const std::shared_ptr<LocalTable>& regions() noexcept { return regions_; }
    const std::vector<std::unique_ptr<RdmaContext>>& contexts() const noexcept { return contexts_; }

    std::shared_ptr<Session> create_session(const std::string& peer);
    // The interval and the timeout are the initiator's.
    std::shared_ptr<Responder> create_responder(const std::string& peer,
                                                Liveness::Seconds keepalive_interval,
                                                Liveness::Seconds keepalive_timeout);

  private:
    void watch_devices();
    void on_device_event(std::uint32_t device, const verbs::DeviceEvent& event);

    const pid_t pid_ = ::getpid();
    const EngineOptions options_;
    Stats stats_;
    RailCounters rail_counters_;
    EventRing ring_{stats_};
    std::vector<std::unique_ptr<RdmaContext>> contexts_;
    std::shared_ptr<LocalTable> regions_;
    std::unique_ptr<Liveness> liveness_;

    std::atomic<bool> closed_{false};
    std::atomic<std::uint64_t> next_id_{1};
    std::mutex mutex_;
    std::vector<std::weak_ptr<Session>> sessions_;
    std::vector<std::weak_ptr<Responder>> responders_;
};

}  // namespace aioflagcx::engine
