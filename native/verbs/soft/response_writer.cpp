#include "verbs/soft/response_writer.h"

#include <algorithm>
#include <cerrno>

#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft {

namespace {

// Stands in for read data whose memory was taken away in the middle of a chunk.
std::array<std::uint8_t, 65536> zero_bytes;

}  // namespace

void ResponseWriter::read(std::uint64_t addr, std::uint32_t length, std::uint32_t rkey) {
    if (length == 0) return done();
    add({wire::ResponseKind::ReadData, {}, answered_, addr, length, rkey});
}

ResponseWriter::Outcome ResponseWriter::flush() {
    std::size_t moved = 0;
    while (true) {
        if (control_sent_ == sizeof control_ && chunk_left_ == 0 && !next_control()) {
            return Outcome::Idle;
        }
        if (moved >= kTurnBytes) return Outcome::Blocked;  // others' turn; epoll comes back at once
        ssize_t sent = 0;
        Plan plan;
        if (control_sent_ < sizeof control_) {
            plan.pieces[plan.count++] = {reinterpret_cast<std::uint8_t*>(&control_) + control_sent_,
                                         sizeof control_ - control_sent_};
        }
        if (chunk_left_ > 0) {
            const GateGuard inside(responder_.gate());
            if (!inside) return Outcome::Ended;
            PinSet pins;
            plan_data(plan, pins);
            sent = send_pieces(fd_, {plan.pieces.data(), plan.count});
        } else {
            sent = send_pieces(fd_, {plan.pieces.data(), plan.count});
        }
        if (sent < 0) {
            if (errno == EAGAIN) return Outcome::Blocked;
            if (errno != EFAULT || zeros_) return Outcome::Ended;
            zeros_ = true;  // registered, but no longer mapped
            zeros_status_ = WcStatus::RemOpErr;
            continue;
        }
        advance(plan, static_cast<std::size_t>(sent));
        moved += static_cast<std::size_t>(sent);
    }
}

// Chooses the next header to send. False when there is nothing to say.
bool ResponseWriter::next_control() {
    if (refused_) return false;
    if (zeros_) {
        zeros_ = false;
        items_.front().kind = wire::ResponseKind::Nack;
        items_.front().status = zeros_status_;
    }
    if (items_.empty()) {
        if (acked_ == answered_) return false;
        acked_ = answered_;
        set_control({wire::kResponseMagic, wire::ResponseKind::Ack, 0, 0, acked_});
        return true;
    }
    const Item front = items_.front();
    switch (front.kind) {
        case wire::ResponseKind::NotReady:
            items_.pop_front();
            acked_ = front.index + 1;
            set_control(
                {wire::kResponseMagic, front.kind, responder_.min_rnr_timer(), 0, front.index});
            break;
        case wire::ResponseKind::Nack:
            // Nobody touches memory for this QP before the initiator hears of the failure.
            responder_.fail();
            refused_ = true;
            items_.clear();
            set_control({wire::kResponseMagic, front.kind, static_cast<std::uint8_t>(front.status),
                         0, front.index});
            break;
        default:
            begin_chunk();
            break;
    }
    return true;
}

void ResponseWriter::begin_chunk() {
    std::size_t length = 0;
    std::size_t count = 0;
    for (const Item& item : items_) {
        if (item.kind != wire::ResponseKind::ReadData || count == kFrameRequests) break;
        length += item.left;
        ++count;
        if (length >= kResponseBytes) break;
    }
    chunk_left_ = std::min(length, kResponseBytes);
    set_control({wire::kResponseMagic, wire::ResponseKind::ReadData, 0,
                 static_cast<std::uint32_t>(chunk_left_), items_.front().index});
}

void ResponseWriter::plan_data(Plan& plan, PinSet& pins) {
    if (zeros_) return plan_zeros(plan);
    for (const Item& item : items_) {
        if (plan.data == chunk_left_) break;
        const MrRef& entry = mrs_.find(item.rkey);
        if (!entry || !entry->grants(item.addr, item.left, kAccessRemoteRead) || !pins.add(entry)) {
            if (plan.data > 0) break;  // what comes before it can still go
            zeros_ = true;
            zeros_status_ = WcStatus::RemAccessErr;
            return plan_zeros(plan);
        }
        const std::size_t size = std::min<std::size_t>(item.left, chunk_left_ - plan.data);
        plan.pieces[plan.count++] = {reinterpret_cast<void*>(item.addr), size};
        plan.data += size;
    }
    if (plan.data == chunk_left_) {
        const std::uint64_t settled = settled_after(plan.data);
        if (settled > acked_) {
            plan.ack = {wire::kResponseMagic, wire::ResponseKind::Ack, 0, 0, settled};
            plan.pieces[plan.count++] = {&plan.ack, sizeof plan.ack};
        }
    }
}

void ResponseWriter::plan_zeros(Plan& plan) noexcept {
    plan.data = std::min(chunk_left_, zero_bytes.size());
    plan.pieces[plan.count++] = {zero_bytes.data(), plan.data};
}

// How many requests are carried out once `data` more bytes of the front reads are sent.
std::uint64_t ResponseWriter::settled_after(std::size_t data) const noexcept {
    for (const Item& item : items_) {
        if (item.kind != wire::ResponseKind::ReadData || item.left > data) return item.index;
        data -= item.left;
    }
    return answered_;
}

void ResponseWriter::advance(const Plan& plan, std::size_t sent) {
    const std::size_t control = std::min(sent, sizeof control_ - control_sent_);
    control_sent_ += control;
    sent -= control;
    const std::size_t data = std::min(sent, plan.data);
    consume_data(data);
    sent -= data;
    if (sent > 0) {
        acked_ = plan.ack.index;
        set_control(plan.ack, sent);
    }
}

void ResponseWriter::consume_data(std::size_t bytes) {
    chunk_left_ -= bytes;
    if (zeros_) return;
    while (bytes > 0) {
        Item& item = items_.front();
        const std::size_t size = std::min<std::size_t>(item.left, bytes);
        item.addr += size;
        item.left -= static_cast<std::uint32_t>(size);
        bytes -= size;
        if (item.left == 0) items_.pop_front();
    }
}

void ResponseWriter::set_control(const wire::Response& response,
                                 std::size_t already_sent) noexcept {
    control_ = response;
    control_sent_ = already_sent;
}

}  // namespace aioflagcx::verbs::soft
