// The initiator's end of one TCP stream: sends frames, takes in responses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>

#include "common/unique_fd.h"
#include "verbs/soft/completion_queue.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/send_queue.h"
#include "verbs/soft/wire.h"

namespace aioflagcx::verbs::soft {

class SendStream;

// What streams tell their initiator.
class StreamOwner {
  public:
    virtual ~StreamOwner() = default;
    virtual void stream_ready() noexcept = 0;  // events came: call receive() and send() soon
    virtual void receiver_not_ready(std::uint8_t min_rnr_timer) = 0;
};

// Why a stream, and with it the QP, can go no further.
struct StreamFailure {
    // The request at fault; none: the peer is gone or talks nonsense, the oldest request tells.
    std::optional<std::uint64_t> seq;
    WcStatus status = WcStatus::RetryExcErr;
    int error = 0;
};

// Registered memory is pinned around each system call and looked up anew for the next.
// Used under the send CQ's progress mutex.
class SendStream final : public EventSink {
  public:
    SendStream(UniqueFd fd, SendQueue& queue, MrCache& mrs, StreamOwner& owner);

    int fd() const noexcept { return fd_.get(); }
    void close() noexcept;
    void on_events(std::uint32_t events) noexcept override;

    bool readable() const noexcept { return readable_; }
    bool busy() const noexcept { return frame_.count > 0; }  // a frame is partly sent
    bool idle() const noexcept { return writable_ && !busy(); }
    std::uint64_t unacked() const noexcept { return unacked_; }

    // While idle(): puts the queue's next request into the frame to be sent.
    bool has_room(std::size_t length) const noexcept;
    void append(std::uint64_t seq);
    // Sends of the frame what the socket takes; the bytes sent are taken off `budget`.
    std::optional<StreamFailure> send(std::size_t& budget);
    // Takes in responses until the socket is empty or about kTurnBytes have come.
    std::optional<StreamFailure> receive();

  private:
    struct Frame {
        std::array<std::uint8_t, wire::kFrameMeta> meta;
        std::size_t meta_size = 0;
        std::size_t meta_sent = 0;
        std::size_t count = 0;  // 0: none
        std::size_t payload = 0;
        std::uint64_t first_seq = 0;  // requests of a frame are consecutive
        // Requests before `cursor`, and `offset` bytes of it, have been sent.
        std::size_t cursor = 0;
        std::size_t offset = 0;
    };
    struct InFlight {
        std::uint64_t seq;
        std::uint32_t length;
        std::uint32_t received;  // bytes of a read
        bool is_read;
    };

    const SendWr& frame_request(std::size_t i) const noexcept {
        return queue_.request(frame_.first_seq + i);
    }
    void skip_sent() noexcept;
    void advance_frame(std::size_t sent) noexcept;

    std::optional<StreamFailure> receive_once(std::size_t& budget, bool& drained);
    std::optional<StreamFailure> take_headers(std::size_t bytes);
    std::optional<StreamFailure> take_header(const wire::Response& response);
    std::optional<StreamFailure> take_data(std::size_t bytes);
    std::optional<StreamFailure> answer_below(std::uint64_t index);
    void drop_front() noexcept;
    std::optional<std::size_t> next_read(std::size_t from) const noexcept;
    static StreamFailure nonsense() noexcept { return {{}, WcStatus::BadRespErr, 0}; }

    UniqueFd fd_;
    SendQueue& queue_;
    MrCache& mrs_;
    StreamOwner& owner_;
    // Edge-triggered readiness, as last seen; the kernel reports only changes.
    bool readable_ = true;
    bool writable_ = true;
    bool ended_ = false;  // the peer closed or reset: read to the end to learn why

    Frame frame_;
    std::deque<InFlight> in_flight_;  // of frames begun, not yet answered
    std::uint64_t first_index_ = 0;   // the stream's number of in_flight_.front()
    std::uint64_t sent_index_ = 0;    // below it, requests have been sent wholly
    std::uint64_t unacked_ = 0;       // bytes of in_flight_
    std::size_t reads_in_flight_ = 0;

    std::array<wire::Response, kHeadersAtOnce> headers_;
    std::size_t header_bytes_ = 0;   // of an incomplete header at the front of headers_
    std::size_t data_left_ = 0;      // bytes of read data before the next header
    std::size_t read_position_ = 0;  // in in_flight_: where they belong
};

}  // namespace aioflagcx::verbs::soft
