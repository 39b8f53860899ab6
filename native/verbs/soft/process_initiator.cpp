#include "verbs/soft/process_initiator.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft {

void ProcessInitiator::pump() {
    while (queue_.may_start()) {
        const std::uint64_t seq = queue_.next();
        const WcStatus local = queue_.local_error(seq);
        if (local != WcStatus::Success) return fail(seq, local);
        queue_.start();
        const std::optional<WcStatus> status = execute(queue_.request(seq));
        if (!status) return not_ready(target_->min_rnr_timer());
        if (*status == WcStatus::RetryExcErr) return fail_oldest(WcStatus::RetryExcErr, ECONNRESET);
        if (*status != WcStatus::Success) return fail(seq, *status);
        queue_.finish(seq);
    }
}

std::optional<WcStatus> ProcessInitiator::execute(const SendWr& wr) {
    std::uint32_t access = kAccessRemoteWrite;
    switch (wr.opcode) {
        case WrOpcode::Send:
            return send(wr);
        case WrOpcode::RdmaRead:
            access = kAccessRemoteRead;
            break;
        case WrOpcode::RdmaWrite:
        case WrOpcode::RdmaWriteWithImm:
            break;
    }
    const WcStatus status = copy(wr, wr.rkey, wr.remote_addr, access);
    if (status != WcStatus::Success || wr.opcode != WrOpcode::RdmaWriteWithImm) return status;
    return take_immediate(wr);
}

std::optional<WcStatus> ProcessInitiator::take_immediate(const SendWr& wr) {
    if (target_->gate().state() != Gate::State::Open) return WcStatus::RetryExcErr;
    const auto receive = target_->receives().take();
    if (!receive) return std::nullopt;
    WorkCompletion wc;
    wc.opcode = WcOpcode::RecvRdmaWithImm;
    wc.with_imm = true;
    wc.imm = wr.imm;
    wc.byte_len = wr.sge.length;
    target_->receives().complete(receive->ticket, wc);
    return WcStatus::Success;
}

std::optional<WcStatus> ProcessInitiator::send(const SendWr& wr) {
    if (target_->gate().state() != Gate::State::Open) return WcStatus::RetryExcErr;
    const auto receive = target_->receives().take();
    if (!receive) return std::nullopt;
    const Sge& sge = receive->wr.sge;
    WorkCompletion wc;
    wc.opcode = WcOpcode::Recv;
    wc.byte_len = wr.sge.length;
    WcStatus answer = WcStatus::Success;
    if (wr.sge.length > sge.length) {
        wc.status = WcStatus::LocLenErr;
        answer = WcStatus::RemInvReqErr;
    } else {
        answer = copy(wr, sge.lkey, sge.addr, kAccessLocalWrite);
        if (answer == WcStatus::RemAccessErr) {  // the receiver's own key is the one at fault
            wc.status = WcStatus::LocProtErr;
            answer = WcStatus::RemOpErr;
        }
    }
    if (answer == WcStatus::Success || wc.status != WcStatus::Success) {
        target_->receives().complete(receive->ticket, wc);
    }
    return answer;
}

WcStatus ProcessInitiator::copy(const SendWr& wr, std::uint32_t remote_key,
                                std::uint64_t remote_addr, std::uint32_t remote_access) {
    const bool reading = wr.opcode == WrOpcode::RdmaRead;
    const std::uint32_t local_access = reading ? kAccessLocalWrite : 0;
    std::uint64_t done = 0;
    do {
        const GateGuard inside(target_->gate());
        if (!inside) return WcStatus::RetryExcErr;
        const std::size_t size = std::min<std::size_t>(wr.sge.length - done, kCopyBytes);
        if (size == 0) return WcStatus::Success;
        // Looked up anew for each piece: either region may have been deregistered meanwhile.
        PinSet pins;
        const MrRef& local = mrs_.find(wr.sge.lkey);
        if (!local || !local->grants(wr.sge.addr, wr.sge.length, local_access) ||
            !pins.add(local)) {
            return WcStatus::LocProtErr;
        }
        const MrRef& remote = target_mrs_.find(remote_key);
        if (!remote || !remote->grants(remote_addr, wr.sge.length, remote_access) ||
            !pins.add(remote)) {
            return WcStatus::RemAccessErr;
        }
        auto* here = reinterpret_cast<void*>(wr.sge.addr + done);
        auto* there = reinterpret_cast<void*>(remote_addr + done);
        // Not memcpy: a request may move within one buffer.
        std::memmove(reading ? here : there, reading ? there : here, size);
        done += size;
    } while (done < wr.sge.length);
    return WcStatus::Success;
}

}  // namespace aioflagcx::verbs::soft
