// The responder's half of a TCP stream that sends: acknowledgements, read data, refusals.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "verbs/soft/memory.h"
#include "verbs/soft/responder.h"
#include "verbs/soft/wire.h"

namespace aioflagcx::verbs::soft {

// Sends responses in the order of the stream's requests, as far as the socket takes them. Memory
// for what waits is bounded: acknowledgements merge, and full() stops taking requests.
// Used by the device's I/O thread only.
class ResponseWriter {
  public:
    enum class Outcome {
        Idle,     // nothing left to send
        Blocked,  // the socket takes no more now
        Ended,    // the peer is gone, or the responder was fenced
    };

    ResponseWriter(int fd, Responder& responder) noexcept : fd_(fd), responder_(responder) {}

    bool full() const noexcept { return items_.size() >= kMaxResponses; }
    // The responder is in ERR and the initiator is told so: what remains is to send that.
    bool refused() const noexcept { return refused_; }

    // In the order of requests, each of which is answered by exactly one of these.
    void done() noexcept { ++answered_; }
    void read(std::uint64_t addr, std::uint32_t length, std::uint32_t rkey);
    void not_ready() { add({wire::ResponseKind::NotReady, {}, answered_}); }
    void refuse(WcStatus status) { add({wire::ResponseKind::Nack, status, answered_}); }

    Outcome flush();

  private:
    struct Item {
        wire::ResponseKind kind;  // ReadData, NotReady or Nack
        WcStatus status = WcStatus::Success;
        std::uint64_t index = 0;
        std::uint64_t addr = 0;
        std::uint32_t left = 0;  // bytes of read data
        std::uint32_t rkey = 0;
    };
    // One system call's worth.
    struct Plan {
        std::array<iovec, kFrameRequests + 2> pieces;
        std::size_t count = 0;
        std::size_t data = 0;  // bytes of the chunk among them
        wire::Response ack{};  // what may follow the data
    };

    void add(const Item& item) {
        items_.push_back(item);
        ++answered_;
    }
    bool next_control();
    void begin_chunk();
    void plan_data(Plan& plan, PinSet& pins);
    void plan_zeros(Plan& plan) noexcept;
    std::uint64_t settled_after(std::size_t data) const noexcept;
    void advance(const Plan& plan, std::size_t sent);
    void consume_data(std::size_t bytes);
    void set_control(const wire::Response& response, std::size_t already_sent = 0) noexcept;

    const int fd_;
    Responder& responder_;
    MrCache mrs_{responder_.mrs()};

    std::deque<Item> items_;  // requests that need more than an acknowledgement
    std::uint64_t answered_ = 0;
    std::uint64_t acked_ = 0;  // what the last response sent or begun implies

    wire::Response control_{};  // the header being sent
    std::size_t control_sent_ = sizeof(wire::Response);
    std::size_t chunk_left_ = 0;  // bytes of read data announced and not yet sent
    bool zeros_ = false;          // their memory is gone: zeros take their place, a Nack follows
    WcStatus zeros_status_ = WcStatus::RemAccessErr;
    bool refused_ = false;
};

}  // namespace aioflagcx::verbs::soft
