// The responder's end of one TCP stream.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/unique_fd.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/responder.h"
#include "verbs/soft/response_writer.h"
#include "verbs/soft/wire.h"

namespace aioflagcx::verbs::soft {

// Takes frames off the socket and stores their payload straight into registered memory: a payload
// read also takes the start of the next frame, so nothing is staged and few system calls are made.
// Every region is pinned around each call and looked up anew for the next; the responder's gate is
// entered likewise. Used by the device's I/O thread only.
class ReceiveStream {
  public:
    enum class Outcome {
        Open,
        Refused,  // the responder is in ERR and its initiator is being told on this stream
        Ended,    // close all streams of the responder
    };

    ReceiveStream(UniqueFd fd, std::shared_ptr<Responder> responder);

    int fd() const noexcept { return fd_.get(); }
    Responder& responder() const noexcept { return *responder_; }
    std::uint32_t interest() const noexcept;  // epoll events it waits for, level-triggered

    // Moves at most about kTurnBytes each way.
    Outcome on_ready(std::uint32_t events);
    // From now on throws away what comes, so that closing does not reset the connection before
    // the initiator has read why.
    void linger() noexcept { lingering_ = true; }
    bool lingering() const noexcept { return lingering_; }

  private:
    struct Slot {
        wire::Request request;
        std::uint32_t rkey;    // of where payload goes: the request's, or a posted receive's
        std::uint64_t addr;    // where the next byte of payload goes
        std::uint32_t left;    // bytes of payload still to come
        bool started;          // sends: a receive has been looked for
        bool not_ready;        // sends: there was none, payload is thrown away
        WcStatus status;       // found out when the frame was read; acted on in its turn
        std::uint64_t ticket;  // sends: of the receive in use
    };
    enum class Step { More, Drained, Stopped, Ended };

    WrOpcode opcode(const Slot& slot) const noexcept {
        return static_cast<WrOpcode>(slot.request.opcode);
    }
    Outcome receive();
    Outcome discard_all();
    Step receive_meta(std::size_t& budget);
    Step receive_payload(std::size_t& budget);
    Step discard_payload(std::size_t& budget);
    Step classify(ssize_t got, std::size_t requested, std::size_t& budget);
    Step take_meta();
    bool begin_frame();
    WcStatus check(const wire::Request& request);
    Step settle();
    void start_send(Slot& slot);
    void lose_region(Slot& slot);
    void finish_send(const Slot& slot);
    void finish_immediate(const Slot& slot);
    void refuse(WcStatus status);

    UniqueFd fd_;
    const std::shared_ptr<Responder> responder_;
    MrCache mrs_;
    ResponseWriter writer_;

    std::array<std::uint8_t, wire::kFrameMeta> meta_;
    std::size_t meta_have_ = 0;
    std::size_t meta_need_ = wire::kFrameStart;
    std::array<Slot, kFrameRequests> slots_;
    std::size_t count_ = 0;    // requests of the frame; 0 between frames
    std::size_t current_ = 0;  // the first not carried out
    bool stopped_ = false;     // a request failed: no later one is looked at
    bool blocked_ = false;     // the writer waits for the socket
    bool lingering_ = false;
};

}  // namespace aioflagcx::verbs::soft
