#include "engine/lane.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "engine/rdma_context.h"
#include "engine/transfer_queue.h"

namespace aioflagcx::engine {

Lane::Lane(const RdmaContext& context, Worker& worker, TransferQueue& queue, LaneLimits limits,
           std::uint32_t local_device, std::uint32_t remote_device, Epoch epoch, std::string rail,
           RailCounters::Counter bytes)
    : context_(context),
      worker_(worker),
      queue_(queue),
      limits_(limits),
      local_device_(local_device),
      remote_device_(remote_device),
      epoch_(epoch),
      rail_(std::move(rail)),
      bytes_(std::move(bytes)),
      slots_(limits.max_wr) {
    free_.reserve(limits.max_wr);
    for (std::uint32_t slot = limits.max_wr; slot-- > 0;) free_.push_back(slot);
}

Lane::~Lane() = default;

verbs::SendWr Lane::request_for(const Slice& slice, std::uint32_t slot) const {
    const TransferTask& task = *slice.task;
    verbs::SendWr wr = slice.is_closing() ? closing_request(task)
                                          : request_for(task.op,
                                                        {slice.local, slice.remote, slice.length,
                                                         slice.local_region, slice.remote_region},
                                                        *task.remote);
    wr.wr_id = wr_id(slot);
    return wr;
}

verbs::SendWr Lane::closing_request(const TransferTask& task) const {
    verbs::SendWr wr;
    if (task.imm != 0) {
        wr.opcode = verbs::WrOpcode::RdmaWriteWithImm;
        wr.imm = task.imm;
        return wr;
    }
    const TableRecord& region = *task.confirmed->remote_region;
    wr.opcode = verbs::WrOpcode::RdmaRead;
    wr.remote_addr = task.confirmed->remote;
    wr.rkey = task.remote->rkey(region, remote_device_,
                                (wr.remote_addr - region.addr) / region.chunk_size);
    wr.sge = context_.scratch();
    return wr;
}

verbs::SendWr Lane::request_for(Op op, const Piece& piece, const RemoteTable& table) const {
    verbs::SendWr wr;
    const TableRecord& region = *piece.remote_region;
    wr.opcode = op == Op::Write ? verbs::WrOpcode::RdmaWrite : verbs::WrOpcode::RdmaRead;
    wr.remote_addr = piece.remote;
    wr.rkey =
        table.rkey(region, remote_device_, (wr.remote_addr - region.addr) / region.chunk_size);
    wr.sge = {piece.local, static_cast<std::uint32_t>(piece.length),
              piece.local_region->mr(local_device_, piece.local).lkey()};
    return wr;
}

bool Lane::try_now(Op op, const Pieces& pieces, const RemoteTable& remote) {
    const std::unique_lock lock(qp_mutex_, std::try_to_lock);
    if (!lock || !qp_) return false;
    for (std::size_t i = 0; i < pieces.size(); ++i) {
        // One that crosses into another MR chunk fails here, and is cut when it is queued.
        if (!qp_->try_now(request_for(op, pieces[i], remote))) return false;
    }
    return true;
}

void Lane::destroy_queue_pair() noexcept {
    const std::lock_guard lock(qp_mutex_);
    qp_.reset();
}

bool Lane::serve() {
    if (killed_ || failed_ || free_.empty()) return false;
    taken_.clear();
    queue_.take(*this, taken_, std::min<std::size_t>(limits_.batch, free_.size()),
                limits_.max_inflight_bytes, inflight_bytes_);
    if (taken_.empty()) return false;
    requests_.clear();
    for (std::size_t i = 0; i < taken_.size(); ++i) {
        requests_.push_back(request_for(taken_[i], free_[free_.size() - 1 - i]));
    }
    std::size_t posted = taken_.size();  // also when nobody knows
    try {
        posted = qp_->post_send(requests_);
    } catch (const NativeError&) {
        unusable_ = true;
    }
    for (std::size_t i = 0; i < posted; ++i) {
        inflight_bytes_ += taken_[i].length;
        slots_[free_.back()] = std::move(taken_[i]);
        free_.pop_back();
    }
    if (unusable_) {
        verbs::WorkCompletion wc;
        wc.status = verbs::WcStatus::GeneralErr;
        fail(wc);
        return false;
    }
    if (posted < taken_.size()) queue_.give_back(*this, taken_, posted);
    // Nothing outstanding, so no completion will wake it: the CQ is full of others' completions.
    const bool stuck = posted == 0 && free_.size() == slots_.size();
    return posted != 0 || stuck;
}

void Lane::on_completion(std::uint32_t slot, const verbs::WorkCompletion& wc) {
    // A flush that nobody here asked for is a failure too: the queue pair takes no more.
    if (wc.status != verbs::WcStatus::Success && !killed_) fail(wc);
    end_slot(slot, wc);
    check_flushed();
}

void Lane::end_slot(std::uint32_t slot, const verbs::WorkCompletion& wc) {
    Slice slice = std::move(slots_[slot]);
    slots_[slot] = {};
    free_.push_back(slot);
    inflight_bytes_ -= slice.length;
    queue_.completed(*this, std::move(slice), wc);
}

void Lane::fail(const verbs::WorkCompletion& wc) {
    if (!std::exchange(failed_, true)) hooks_.failed(*this, wc);
}

void Lane::kill() {
    if (std::exchange(killed_, true)) return;
    try {
        // With the lock: once the session has failed, no copy is under way on any thread.
        const std::lock_guard lock(qp_mutex_);
        if (!unusable_) qp_->to_error();
    } catch (const NativeError&) {
        unusable_ = true;
    }
    if (unusable_) {
        destroy_queue_pair();  // its completions go with it
        verbs::WorkCompletion wc;
        wc.status = verbs::WcStatus::WrFlushErr;
        for (std::uint32_t slot = 0; slot < slots_.size(); ++slot) {
            if (slots_[slot].task) end_slot(slot, wc);
        }
    }
    check_flushed();
}

void Lane::abort(const TransferTask& task) {
    const bool holds = std::any_of(slots_.begin(), slots_.end(),
                                   [&](const Slice& slice) { return slice.task.get() == &task; });
    if (holds) hooks_.aborted(*this);
}

void Lane::check_flushed() {
    if (!killed_ || free_.size() != slots_.size()) return;
    if (!hooks_.flushed) return;
    const auto flushed = std::exchange(hooks_.flushed, nullptr);
    flushed(*this);
}

}  // namespace aioflagcx::engine
