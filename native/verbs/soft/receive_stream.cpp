#include "verbs/soft/receive_stream.h"

#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "verbs/soft/guarded_receive.h"
#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft {

ReceiveStream::ReceiveStream(UniqueFd fd, std::shared_ptr<Responder> responder)
    : fd_(std::move(fd)),
      responder_(std::move(responder)),
      mrs_(responder_->mrs()),
      writer_(fd_.get(), *responder_) {}

std::uint32_t ReceiveStream::interest() const noexcept {
    std::uint32_t events = blocked_ ? EPOLLOUT : 0U;
    if (lingering_ || (!stopped_ && !writer_.full())) events |= EPOLLIN;
    return events;
}

ReceiveStream::Outcome ReceiveStream::on_ready(std::uint32_t events) {
    if ((events & (EPOLLHUP | EPOLLERR)) != 0 && (interest() & EPOLLIN) == 0) {
        return Outcome::Ended;  // nothing will read to find it out
    }
    const bool told_before = writer_.refused();
    if (lingering_) {
        if (discard_all() == Outcome::Ended) return Outcome::Ended;
    } else if (receive() == Outcome::Ended) {
        return Outcome::Ended;
    }
    // Streams that linger because another one carries the reason have nothing to say.
    if (lingering_ && !writer_.refused()) {
        blocked_ = false;
        return Outcome::Open;
    }
    const auto outcome = writer_.flush();
    if (outcome == ResponseWriter::Outcome::Ended) return Outcome::Ended;
    blocked_ = outcome == ResponseWriter::Outcome::Blocked;
    return writer_.refused() && !told_before ? Outcome::Refused : Outcome::Open;
}

ReceiveStream::Outcome ReceiveStream::discard_all() {
    for (std::size_t moved = 0; moved < kTurnBytes;) {
        const ssize_t got = discard_bytes(fd_.get(), kTurnBytes);
        if (got == 0 || (got < 0 && errno != EAGAIN)) return Outcome::Ended;
        if (got < 0) break;
        moved += static_cast<std::size_t>(got);
    }
    return Outcome::Open;
}

ReceiveStream::Outcome ReceiveStream::receive() {
    std::size_t budget = kTurnBytes;
    while (!stopped_ && !writer_.full() && budget > 0) {
        Step step = Step::More;
        if (count_ == 0) {
            step = receive_meta(budget);
        } else if (slots_[current_].not_ready) {
            step = discard_payload(budget);
        } else {
            step = receive_payload(budget);
        }
        if (step == Step::Ended) return Outcome::Ended;
        if (step != Step::More) break;
    }
    return Outcome::Open;
}

// What a receive that asked for `requested` bytes says about going on.
ReceiveStream::Step ReceiveStream::classify(ssize_t got, std::size_t requested,
                                            std::size_t& budget) {
    if (got == 0) return Step::Ended;
    if (got < 0) {
        if (errno == EAGAIN) return Step::Drained;
        if (errno != EFAULT) return Step::Ended;
        refuse(WcStatus::RemOpErr);  // registered, but no longer mapped
        return Step::Stopped;
    }
    budget -= std::min(budget, static_cast<std::size_t>(got));
    return static_cast<std::size_t>(got) < requested ? Step::Drained : Step::More;
}

// ---- Frame headers and descriptors -----------------------------------------------------------

ReceiveStream::Step ReceiveStream::receive_meta(std::size_t& budget) {
    iovec piece{meta_.data() + meta_have_, meta_need_ - meta_have_};
    const ssize_t got = receive_pieces(fd_.get(), {&piece, 1});
    const Step step = classify(got, piece.iov_len, budget);
    if (got <= 0) return step;
    meta_have_ += static_cast<std::size_t>(got);
    const Step taken = take_meta();
    return taken == Step::More ? step : taken;
}

ReceiveStream::Step ReceiveStream::take_meta() {
    if (meta_have_ < meta_need_) return Step::More;
    wire::FrameHeader header;
    std::memcpy(&header, meta_.data(), sizeof header);
    if (header.magic != wire::kFrameMagic || header.count == 0 || header.count > kFrameRequests) {
        return Step::Ended;
    }
    meta_need_ = sizeof header + header.count * sizeof(wire::Request);
    if (meta_have_ < meta_need_) return Step::More;
    if (!begin_frame()) return Step::Ended;
    return settle();
}

bool ReceiveStream::begin_frame() {
    wire::FrameHeader header;
    std::memcpy(&header, meta_.data(), sizeof header);
    std::uint64_t payload = 0;
    for (std::size_t i = 0; i < header.count; ++i) {
        Slot& slot = slots_[i];
        slot = {};
        std::memcpy(&slot.request, meta_.data() + sizeof header + i * sizeof(wire::Request),
                    sizeof(wire::Request));
        switch (opcode(slot)) {
            case WrOpcode::RdmaWrite:
            case WrOpcode::RdmaWriteWithImm:
            case WrOpcode::Send:
                slot.left = slot.request.length;
                break;
            case WrOpcode::RdmaRead:
                break;
            default:
                return false;
        }
        if (slot.request.length > kMaxMessage) return false;
        slot.rkey = slot.request.rkey;
        slot.addr = slot.request.remote_addr;
        slot.status = check(slot.request);
        payload += slot.left;
    }
    meta_have_ = 0;
    meta_need_ = wire::kFrameStart;
    count_ = header.count;
    current_ = 0;
    return payload == header.payload;
}

WcStatus ReceiveStream::check(const wire::Request& request) {
    const auto opcode = static_cast<WrOpcode>(request.opcode);
    if (opcode == WrOpcode::Send || request.length == 0) return WcStatus::Success;
    const std::uint32_t needed =
        opcode == WrOpcode::RdmaRead ? kAccessRemoteRead : kAccessRemoteWrite;
    const MrRef& entry = mrs_.find(request.rkey);
    const bool granted = entry && entry->grants(request.remote_addr, request.length, needed);
    return granted ? WcStatus::Success : WcStatus::RemAccessErr;
}

// ---- Payload ---------------------------------------------------------------------------------

ReceiveStream::Step ReceiveStream::receive_payload(std::size_t& budget) {
    const GateGuard inside(responder_->gate());
    if (!inside) return Step::Ended;
    PinSet pins;
    std::array<iovec, kFrameRequests + 1> pieces;
    std::size_t count = 0;
    std::size_t data = 0;
    std::size_t i = current_;
    for (; i < count_ && data < budget; ++i) {
        Slot& slot = slots_[i];
        if (slot.status != WcStatus::Success) break;
        // A later send finds its receive in its turn.
        if (opcode(slot) == WrOpcode::Send && !slot.started) break;
        if (slot.left == 0) continue;
        const std::uint32_t needed =
            opcode(slot) == WrOpcode::Send ? kAccessLocalWrite : kAccessRemoteWrite;
        const MrRef& entry = mrs_.find(slot.rkey);
        if (!entry || !entry->grants(slot.addr, slot.left, needed) || !pins.add(entry)) {
            lose_region(slot);
            break;
        }
        const std::size_t size = std::min<std::size_t>(slot.left, budget - data);
        pieces[count++] = {reinterpret_cast<void*>(slot.addr), size};
        data += size;
        if (size < slot.left) break;
    }
    if (data == 0) return settle();  // the current request lost its region
    std::size_t requested = data;
    if (i == count_) {
        pieces[count++] = {meta_.data(), wire::kFrameStart};
        requested += wire::kFrameStart;
    }
    const ssize_t got = receive_wanted(fd_.get(), {pieces.data(), count});
    const Step step = classify(got, requested, budget);
    if (got <= 0) return step;
    std::size_t stored = std::min(static_cast<std::size_t>(got), data);
    meta_have_ = static_cast<std::size_t>(got) - stored;
    for (std::size_t at = current_; stored > 0; ++at) {
        Slot& slot = slots_[at];
        const std::size_t size = std::min<std::size_t>(slot.left, stored);
        slot.addr += size;
        slot.left -= static_cast<std::uint32_t>(size);
        stored -= size;
    }
    const Step settled = settle();
    return settled == Step::More ? step : settled;
}

ReceiveStream::Step ReceiveStream::discard_payload(std::size_t& budget) {
    Slot& slot = slots_[current_];
    const std::size_t size = std::min<std::size_t>(slot.left, budget);
    const ssize_t got = discard_bytes(fd_.get(), size);
    const Step step = classify(got, size, budget);
    if (got <= 0) return step;
    slot.left -= static_cast<std::uint32_t>(got);
    const Step settled = settle();
    return settled == Step::More ? step : settled;
}

// Carries out the frame's requests as far as their payload has come, in order.
ReceiveStream::Step ReceiveStream::settle() {
    for (; current_ < count_; ++current_) {
        Slot& slot = slots_[current_];
        if (opcode(slot) == WrOpcode::Send && !slot.started) start_send(slot);
        if (slot.status != WcStatus::Success) {
            refuse(slot.status);
            return Step::Stopped;
        }
        if (slot.left > 0) return Step::More;
        switch (opcode(slot)) {
            case WrOpcode::RdmaRead:
                writer_.read(slot.addr, slot.request.length, slot.rkey);
                break;
            case WrOpcode::Send:
                finish_send(slot);
                break;
            case WrOpcode::RdmaWriteWithImm:
                finish_immediate(slot);
                break;
            case WrOpcode::RdmaWrite:
                writer_.done();
                break;
        }
    }
    count_ = 0;
    return take_meta();
}

// ---- Receives --------------------------------------------------------------------------------

void ReceiveStream::start_send(Slot& slot) {
    slot.started = true;
    const auto receive = responder_->receives().take();
    if (!receive) {
        slot.not_ready = true;
        return;
    }
    slot.ticket = receive->ticket;
    const Sge& sge = receive->wr.sge;
    if (slot.request.length > sge.length) {
        WorkCompletion wc;
        wc.status = WcStatus::LocLenErr;
        responder_->receives().complete(slot.ticket, wc);
        slot.status = WcStatus::RemInvReqErr;
    } else if (slot.request.length > 0) {
        slot.rkey = sge.lkey;
        slot.addr = sge.addr;
        const MrRef& entry = mrs_.find(sge.lkey);
        if (!entry || !entry->grants(sge.addr, slot.request.length, kAccessLocalWrite)) {
            lose_region(slot);
        }
    }
}

// The memory a request's payload goes to is not, or no longer, there.
void ReceiveStream::lose_region(Slot& slot) {
    slot.status = WcStatus::RemAccessErr;
    if (opcode(slot) != WrOpcode::Send) return;
    // The receiver's own key is at fault, and its completion says so.
    slot.status = WcStatus::RemOpErr;
    WorkCompletion wc;
    wc.status = WcStatus::LocProtErr;
    responder_->receives().complete(slot.ticket, wc);
}

void ReceiveStream::finish_send(const Slot& slot) {
    if (slot.not_ready) return writer_.not_ready();
    WorkCompletion wc;
    wc.opcode = WcOpcode::Recv;
    wc.byte_len = slot.request.length;
    responder_->receives().complete(slot.ticket, wc);
    writer_.done();
}

void ReceiveStream::finish_immediate(const Slot& slot) {
    const auto receive = responder_->receives().take();
    if (!receive) return writer_.not_ready();
    WorkCompletion wc;
    wc.opcode = WcOpcode::RecvRdmaWithImm;
    wc.with_imm = true;
    wc.imm = slot.request.imm;
    wc.byte_len = slot.request.length;
    responder_->receives().complete(receive->ticket, wc);
    writer_.done();
}

void ReceiveStream::refuse(WcStatus status) {
    writer_.refuse(status);
    stopped_ = true;
}

}  // namespace aioflagcx::verbs::soft
