#include "verbs/soft/receive_queue.h"

#include <algorithm>
#include <cerrno>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

void ReceiveQueue::post(std::span<const RecvWr> requests) {
    const std::lock_guard lock(mutex_);
    if (flushed_) {
        std::vector<WorkCompletion> completions;
        for (const RecvWr& wr : requests) completions.push_back(flushed(wr));
        cq_.push(completions);
        return;
    }
    if (posted_.size() + taken_.size() + requests.size() > capacity_) {
        throw NativeError("post_recv", ENOMEM, "the receive queue is full");
    }
    posted_.insert(posted_.end(), requests.begin(), requests.end());
}

std::optional<ReceiveQueue::Taken> ReceiveQueue::take() {
    const std::lock_guard lock(mutex_);
    if (posted_.empty()) return std::nullopt;
    const Taken taken{next_ticket_++, posted_.front()};
    taken_.push_back(taken);
    posted_.pop_front();
    return taken;
}

void ReceiveQueue::complete(std::uint64_t ticket, WorkCompletion wc) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(taken_.begin(), taken_.end(),
                                    [ticket](const Taken& t) { return t.ticket == ticket; });
    if (found == taken_.end()) return;
    wc.wr_id = found->wr.wr_id;
    wc.qp_num = qp_num_;
    taken_.erase(found);
    cq_.push({&wc, 1});
}

void ReceiveQueue::flush() {
    const std::lock_guard lock(mutex_);
    if (flushed_) return;
    flushed_ = true;
    std::vector<WorkCompletion> completions;
    for (const Taken& taken : taken_) completions.push_back(flushed(taken.wr));
    for (const RecvWr& wr : posted_) completions.push_back(flushed(wr));
    taken_.clear();
    posted_.clear();
    cq_.push(completions);
}

WorkCompletion ReceiveQueue::flushed(const RecvWr& wr) const noexcept {
    WorkCompletion wc;
    wc.wr_id = wr.wr_id;
    wc.status = WcStatus::WrFlushErr;
    wc.opcode = WcOpcode::Recv;
    wc.qp_num = qp_num_;
    return wc;
}

}  // namespace aioflagcx::verbs::soft
