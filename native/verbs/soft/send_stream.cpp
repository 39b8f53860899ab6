#include "verbs/soft/send_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft {

namespace {

std::size_t payload_of(const SendWr& wr) noexcept {
    return wr.opcode == WrOpcode::RdmaRead ? 0 : wr.sge.length;
}

}  // namespace

SendStream::SendStream(UniqueFd fd, SendQueue& queue, MrCache& mrs, StreamOwner& owner)
    : fd_(std::move(fd)), queue_(queue), mrs_(mrs), owner_(owner) {}

void SendStream::close() noexcept {
    if (fd_) reset_connection(fd_.get());
    fd_.reset();
    readable_ = writable_ = false;
}

void SendStream::on_events(std::uint32_t events) noexcept {
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) ended_ = true;
    if ((events & (EPOLLIN | EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) readable_ = true;
    if ((events & (EPOLLOUT | EPOLLHUP | EPOLLERR)) != 0) writable_ = true;
    owner_.stream_ready();
}

// ---- Frames ----------------------------------------------------------------------------------

bool SendStream::has_room(std::size_t length) const noexcept {
    if (frame_.count == 0) return true;
    return frame_.count < kFrameRequests && frame_.payload + length <= kFrameBytes;
}

void SendStream::append(std::uint64_t seq) {
    const SendWr& wr = queue_.request(seq);
    if (frame_.count == 0) {
        frame_.first_seq = seq;
        frame_.meta_size = sizeof(wire::FrameHeader);
    }
    const wire::Request request{
        static_cast<std::uint8_t>(wr.opcode), {}, wr.sge.length, wr.rkey, wr.imm, wr.remote_addr};
    std::memcpy(frame_.meta.data() + frame_.meta_size, &request, sizeof request);
    frame_.meta_size += sizeof request;
    frame_.payload += payload_of(wr);
    ++frame_.count;
    const wire::FrameHeader header{wire::kFrameMagic, static_cast<std::uint16_t>(frame_.count),
                                   static_cast<std::uint32_t>(frame_.payload)};
    std::memcpy(frame_.meta.data(), &header, sizeof header);
    const bool is_read = wr.opcode == WrOpcode::RdmaRead;
    in_flight_.push_back({seq, wr.sge.length, 0, is_read});
    unacked_ += wr.sge.length;
    if (is_read) ++reads_in_flight_;
}

std::optional<StreamFailure> SendStream::send(std::size_t& budget) {
    while (frame_.count > 0 && writable_ && budget > 0) {
        PinSet pins;
        std::array<iovec, kFrameRequests + 1> pieces;
        std::size_t count = 0;
        if (frame_.meta_sent < frame_.meta_size) {
            pieces[count++] = {frame_.meta.data() + frame_.meta_sent,
                               frame_.meta_size - frame_.meta_sent};
        }
        std::size_t bytes = 0;
        for (std::size_t i = frame_.cursor; i < frame_.count && bytes < kTurnBytes; ++i) {
            const SendWr& wr = frame_request(i);
            const std::size_t skip = i == frame_.cursor ? frame_.offset : 0;
            if (payload_of(wr) == skip) continue;
            const MrRef& entry = mrs_.find(wr.sge.lkey);
            if (!entry || !entry->covers(wr.sge.addr, wr.sge.length) || !pins.add(entry)) {
                if (count == 0) return StreamFailure{frame_.first_seq + i, WcStatus::LocProtErr, 0};
                break;  // what comes before it can still go
            }
            const std::size_t size = std::min(payload_of(wr) - skip, kTurnBytes - bytes);
            pieces[count++] = {reinterpret_cast<void*>(wr.sge.addr + skip), size};
            bytes += size;
        }
        const ssize_t sent = send_pieces(fd_.get(), {pieces.data(), count});
        if (sent < 0) {
            if (errno == EFAULT) {
                return StreamFailure{frame_.first_seq + frame_.cursor, WcStatus::LocProtErr,
                                     EFAULT};
            }
            writable_ = false;
            if (errno != EAGAIN) {
                // The peer may have said why before it left: receive() finds out.
                ended_ = true;
                readable_ = true;
                owner_.stream_ready();
            }
            break;
        }
        advance_frame(static_cast<std::size_t>(sent));
        budget -= std::min(budget, static_cast<std::size_t>(sent));
    }
    return std::nullopt;
}

void SendStream::advance_frame(std::size_t sent) noexcept {
    const std::size_t meta = std::min(sent, frame_.meta_size - frame_.meta_sent);
    frame_.meta_sent += meta;
    sent -= meta;
    skip_sent();
    while (sent > 0) {
        const std::size_t size =
            std::min(sent, payload_of(frame_request(frame_.cursor)) - frame_.offset);
        frame_.offset += size;
        sent -= size;
        skip_sent();
    }
    if (frame_.cursor == frame_.count) {
        frame_.count = frame_.payload = frame_.cursor = frame_.meta_sent = frame_.meta_size = 0;
    }
}

// Moves the cursor over requests of which nothing is left to send.
void SendStream::skip_sent() noexcept {
    if (frame_.meta_sent < frame_.meta_size) return;
    while (frame_.cursor < frame_.count &&
           frame_.offset == payload_of(frame_request(frame_.cursor))) {
        ++frame_.cursor;
        ++sent_index_;
        frame_.offset = 0;
    }
}

// ---- Responses -------------------------------------------------------------------------------

std::optional<StreamFailure> SendStream::receive() {
    std::size_t budget = kTurnBytes;
    bool drained = false;
    while (readable_ && !drained) {
        if (budget == 0) {
            owner_.stream_ready();
            break;
        }
        if (auto failure = receive_once(budget, drained)) return failure;
    }
    return std::nullopt;
}

std::optional<StreamFailure> SendStream::receive_once(std::size_t& budget, bool& drained) {
    PinSet pins;
    std::array<iovec, kFrameRequests + 1> pieces;
    std::size_t count = 0;
    std::size_t data = 0;
    const std::size_t wanted = std::min(data_left_, budget);
    std::size_t position = read_position_;
    while (data < wanted && count < kFrameRequests) {
        const auto at = next_read(position);
        if (!at) return nonsense();  // more data than the reads in flight ask for
        position = *at + 1;
        const InFlight& read = in_flight_[*at];
        const SendWr& wr = queue_.request(read.seq);
        const MrRef& entry = mrs_.find(wr.sge.lkey);
        if (!entry || !entry->grants(wr.sge.addr, wr.sge.length, kAccessLocalWrite) ||
            !pins.add(entry)) {
            if (count == 0) return StreamFailure{read.seq, WcStatus::LocProtErr, 0};
            break;
        }
        const std::size_t size = std::min<std::size_t>(read.length - read.received, wanted - data);
        pieces[count++] = {reinterpret_cast<void*>(wr.sge.addr + read.received), size};
        data += size;
    }
    std::size_t requested = data;
    if (data == data_left_) {
        // With reads in flight one header at a time, since their data may follow it.
        const std::size_t room = reads_in_flight_ > 0 ? sizeof(wire::Response) : sizeof(headers_);
        pieces[count++] = {reinterpret_cast<std::uint8_t*>(headers_.data()) + header_bytes_,
                           room - header_bytes_};
        requested += room - header_bytes_;
    }
    const ssize_t got = receive_pieces(fd_.get(), {pieces.data(), count});
    if (got == 0) return StreamFailure{{}, WcStatus::RetryExcErr, 0};
    if (got < 0) {
        if (errno == EAGAIN) {
            readable_ = false;
            return std::nullopt;
        }
        if (errno == EFAULT && data > 0) {
            return StreamFailure{in_flight_[*next_read(read_position_)].seq, WcStatus::LocProtErr,
                                 EFAULT};
        }
        return StreamFailure{{}, WcStatus::RetryExcErr, errno};
    }
    const auto bytes = static_cast<std::size_t>(got);
    budget -= std::min(budget, bytes);
    // A short count means the socket is empty, and an edge will tell of more; but the end of the
    // stream may already have been told.
    if (bytes < requested && !ended_) {
        readable_ = false;
        drained = true;
    }
    if (auto failure = take_data(std::min(bytes, data))) return failure;
    return take_headers(bytes - std::min(bytes, data));
}

std::optional<StreamFailure> SendStream::take_data(std::size_t bytes) {
    data_left_ -= bytes;
    while (bytes > 0) {
        const auto at = next_read(read_position_);
        if (!at) return nonsense();
        InFlight& read = in_flight_[*at];
        const std::size_t size = std::min<std::size_t>(read.length - read.received, bytes);
        read.received += static_cast<std::uint32_t>(size);
        bytes -= size;
        read_position_ = read.received == read.length ? *at + 1 : *at;
    }
    return std::nullopt;
}

std::optional<StreamFailure> SendStream::take_headers(std::size_t bytes) {
    header_bytes_ += bytes;
    std::size_t taken = 0;
    while (header_bytes_ - taken >= sizeof(wire::Response)) {
        // Read data is announced only while reads are in flight, and then headers come one by one.
        if (data_left_ > 0) return nonsense();
        const wire::Response response = headers_[taken / sizeof(wire::Response)];
        taken += sizeof(wire::Response);
        if (auto failure = take_header(response)) return failure;
    }
    header_bytes_ -= taken;
    std::memmove(headers_.data(), reinterpret_cast<std::uint8_t*>(headers_.data()) + taken,
                 header_bytes_);
    return std::nullopt;
}

std::optional<StreamFailure> SendStream::take_header(const wire::Response& response) {
    if (response.magic != wire::kResponseMagic) return nonsense();
    switch (response.kind) {
        case wire::ResponseKind::Ack:
            return answer_below(response.index);
        case wire::ResponseKind::ReadData: {
            const auto at = next_read(read_position_);
            if (!at || response.length == 0 || first_index_ + *at != response.index) {
                return nonsense();
            }
            data_left_ = response.length;
            return std::nullopt;
        }
        case wire::ResponseKind::NotReady: {
            if (auto failure = answer_below(response.index)) return failure;
            if (response.index >= sent_index_) return nonsense();
            const WrOpcode opcode = queue_.request(in_flight_.front().seq).opcode;
            if (opcode != WrOpcode::Send && opcode != WrOpcode::RdmaWriteWithImm) {
                return nonsense();
            }
            drop_front();
            owner_.receiver_not_ready(response.detail);
            return std::nullopt;
        }
        case wire::ResponseKind::Nack: {
            if (auto failure = answer_below(response.index)) return failure;
            const auto status = static_cast<WcStatus>(response.detail);
            const bool known = status == WcStatus::RemAccessErr ||
                               status == WcStatus::RemInvReqErr || status == WcStatus::RemOpErr;
            if (!known || in_flight_.empty()) return nonsense();
            return StreamFailure{in_flight_.front().seq, status, 0};
        }
    }
    return nonsense();
}

std::optional<StreamFailure> SendStream::answer_below(std::uint64_t index) {
    if (index < first_index_ || index > sent_index_) return nonsense();
    while (first_index_ < index) {
        const InFlight request = in_flight_.front();
        if (request.is_read && request.received != request.length) return nonsense();
        drop_front();
        queue_.finish(request.seq);
    }
    return std::nullopt;
}

void SendStream::drop_front() noexcept {
    if (in_flight_.front().is_read) --reads_in_flight_;
    unacked_ -= in_flight_.front().length;
    in_flight_.pop_front();
    ++first_index_;
    if (read_position_ > 0) --read_position_;
}

// The first read at or after `from` in in_flight_ that still lacks bytes.
std::optional<std::size_t> SendStream::next_read(std::size_t from) const noexcept {
    for (std::size_t i = from; i < in_flight_.size(); ++i) {
        if (in_flight_[i].is_read && in_flight_[i].received < in_flight_[i].length) return i;
    }
    return std::nullopt;
}

}  // namespace aioflagcx::verbs::soft
