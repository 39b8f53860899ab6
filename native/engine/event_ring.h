// How results leave the native threads: a queue with one eventfd, written only when the event loop
// has not been woken yet.
#pragma once

#include <cstdint>
#include <mutex>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "common/event_fd.h"
#include "engine/epoch.h"
#include "engine/stats.h"

namespace aioflagcx::engine {

enum class TaskStatus : std::uint8_t {
    Done = 0,
    Cancelled = 1,
    RemoteAccess = 2,
    RetryExceeded = 3,
    Local = 4,
    Lost = 5,
};

struct TransferEvent {
    std::uint64_t id = 0;
    TaskStatus status = TaskStatus::Done;
    std::vector<Epoch> unknown_epochs;
    std::string cause;
    std::uint32_t vendor_err = 0;
    std::string rail;
    std::uint64_t address = 0;
    std::uint64_t length = 0;
};

struct EndpointDown {
    std::uint64_t session = 0;
    Epoch epoch;
    std::string cause;
    std::uint32_t vendor_err = 0;
    std::string rail;
    bool path = false;  // the path is at fault, not one request
};

struct KeepaliveLost {
    std::uint64_t owner = 0;
    std::string reason;
};

struct Immediates {
    std::uint64_t responder = 0;
    std::uint32_t imm = 0;
};

// Why a rail does not take a better path than it does.
struct PathNote {
    std::uint64_t session = 0;
    std::string rail;
    std::string path;
    std::string note;
};

// What a device of ours reports by itself.
struct DeviceNote {
    std::uint32_t device = 0;  // its index
    std::string name;
    std::string text;
    bool bad = false;   // its rails, or those of one queue pair, have been taken down
    bool back = false;  // its rails can be connected again
};

using Event =
    std::variant<TransferEvent, EndpointDown, KeepaliveLost, Immediates, PathNote, DeviceNote>;

// Lock: mutex_ guards the queues and `woken_`; a leaf.
class EventRing {
  public:
    explicit EventRing(Stats& stats) : stats_(stats) {}

    int fd() const noexcept { return fd_.fd(); }
    void push_done(std::uint64_t id);
    void push(Event event);

    // Takes everything and clears the wake-up.
    std::pair<std::vector<std::uint64_t>, std::vector<Event>> drain();

  private:
    void wake_locked();

    Stats& stats_;
    EventFd fd_;
    std::mutex mutex_;
    std::vector<std::uint64_t> done_;
    std::vector<Event> events_;
    bool woken_ = false;
};

}  // namespace aioflagcx::engine
