#include "verbs/soft/send_queue.h"

namespace aioflagcx::verbs::soft {

namespace {

WcOpcode completion_opcode(WrOpcode opcode) noexcept {
    switch (opcode) {
        case WrOpcode::RdmaWrite:
        case WrOpcode::RdmaWriteWithImm:
            return WcOpcode::RdmaWrite;
        case WrOpcode::RdmaRead:
            return WcOpcode::RdmaRead;
        case WrOpcode::Send:
            break;
    }
    return WcOpcode::Send;
}

}  // namespace

SendQueue::SendQueue(SoftCompletionQueue& cq, std::uint32_t qp_num, std::uint32_t capacity)
    : cq_(cq), qp_num_(qp_num), slots_(capacity) {}

void SendQueue::push(const SendWr& wr, WcStatus local_error) {
    slot(tail_) = Slot{wr, local_error, false};
    ++tail_;
}

bool SendQueue::may_start() const noexcept {
    if (next_ == tail_) return false;
    if (next_ == head_) return true;
    return !alone(slot(next_)) && !alone(slot(next_ - 1));
}

void SendQueue::finish(std::uint64_t seq) {
    slot(seq).done = true;
    while (head_ != next_ && slot(head_).done) {
        const SendWr& wr = slot(head_).wr;
        if (wr.signaled) {
            WorkCompletion wc;
            wc.wr_id = wr.wr_id;
            wc.opcode = completion_opcode(wr.opcode);
            wc.qp_num = qp_num_;
            completions_.push_back(wc);
        }
        ++head_;
    }
}

void SendQueue::fail(std::uint64_t seq, WcStatus status, std::uint32_t vendor_err) {
    for (; head_ != tail_; ++head_) {
        const bool culprit = head_ == seq;
        reject(slot(head_).wr, culprit ? status : WcStatus::WrFlushErr, culprit ? vendor_err : 0);
    }
    next_ = tail_;
}

void SendQueue::reject(const SendWr& wr, WcStatus status, std::uint32_t vendor_err) {
    WorkCompletion wc;
    wc.wr_id = wr.wr_id;
    wc.status = status;
    wc.opcode = completion_opcode(wr.opcode);
    wc.vendor_err = vendor_err;
    wc.qp_num = qp_num_;
    completions_.push_back(wc);
}

void SendQueue::report() {
    cq_.push(completions_);
    completions_.clear();
}

}  // namespace aioflagcx::verbs::soft
