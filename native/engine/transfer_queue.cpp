#include "engine/transfer_queue.h"

#include <algorithm>
#include <utility>

#include "engine/limits.h"

namespace aioflagcx::engine {

using verbs::WcStatus;

namespace {

void insert_unique(std::vector<Epoch>& values, const Epoch& value) {
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
}

bool is_access_error(WcStatus status) noexcept {
    return status == WcStatus::RemAccessErr || status == WcStatus::RemInvReqErr ||
           status == WcStatus::RemOpErr;
}

// LocQpOpErr is none: it is about the queue pair (Soft-RoCE's end so when their port is down).
bool is_local_error(WcStatus status) noexcept {
    return status == WcStatus::LocLenErr || status == WcStatus::LocProtErr ||
           status == WcStatus::LocAccessErr || status == WcStatus::BadRespErr;
}

// Bytes from `addr` to the end of the MR chunk it lies in.
std::uint64_t chunk_left(std::uint64_t base, std::uint64_t chunk_size,
                         std::uint64_t addr) noexcept {
    return chunk_size - (addr - base) % chunk_size;
}

}  // namespace

bool Cause::transport() const noexcept {
    return status != WcStatus::Success && !is_access_error(status) && !is_local_error(status);
}

bool TransferQueue::submit(const Task& task) {
    const std::lock_guard lock(mutex_);
    if (lost_) return false;
    if (task->waiter) {
        if (task->waiter->stage_ != Waiter::Stage::Fresh) return false;
        task->waiter->stage_ = Waiter::Stage::Submitted;
        task->waiter->task_ = task;
    }
    add(stats_.transfers_submitted);
    add(stats_.transfers_inflight);
    tasks_.emplace(task.get(), task);
    if (task->has_data()) {
        make_runnable(task);
        // One is enough for little, but only where every lane is known to have room.
        if (tasks_.size() == 1 && task->bytes_total <= kOneLaneBytes && !lanes_.empty()) {
            lanes_[++turn_ % lanes_.size()]->wake();
            one_woken_ = true;
        } else {
            wake_lanes();
        }
    } else {
        maybe_finish(task);
    }
    return true;
}

std::shared_ptr<Lane> TransferQueue::idle_lane() {
    const std::lock_guard lock(mutex_);
    return lost_ || !tasks_.empty() || lanes_.empty() ? nullptr : lanes_.front();
}

void TransferQueue::done_now(Op op, std::uint64_t bytes) noexcept {
    add(stats_.transfers_submitted);
    add(stats_.transfers_done);
    add(op == Op::Write ? stats_.bytes_written : stats_.bytes_read, bytes);
}

void TransferQueue::make_runnable(const Task& task) {
    if (task->queued || task->dropped) return;
    task->queued = true;
    runnable_.push_back(task);
}

void TransferQueue::wake_lanes() {
    for (const auto& lane : lanes_) lane->wake();
}

Slice TransferQueue::cut(const Task& task) {
    if (!task->again.empty()) {
        Slice slice = std::move(task->again.back());
        task->again.pop_back();
        return slice;
    }
    const Piece piece = task->pieces[task->next_piece];
    Slice slice;
    slice.task = task;
    slice.local_region = piece.local_region;
    slice.remote_region = piece.remote_region;
    slice.local = piece.local + task->next_offset;
    slice.remote = piece.remote + task->next_offset;
    const std::uint64_t length = std::min(
        {std::uint64_t{slice_size_}, piece.length - task->next_offset,
         chunk_left(piece.local_region->spec.addr, piece.local_region->chunk_size, slice.local),
         chunk_left(piece.remote_region->addr, piece.remote_region->chunk_size, slice.remote)});
    slice.length = static_cast<std::uint32_t>(length);
    task->next_offset += length;
    if (task->next_offset == piece.length) {
        ++task->next_piece;
        task->next_offset = 0;
    }
    return slice;
}

void TransferQueue::take(Lane& lane, std::vector<Slice>& out, std::size_t max_count,
                         std::uint64_t limit, std::uint64_t inflight) {
    const std::lock_guard lock(mutex_);
    const std::uint64_t may_have = window(lane, limit);
    std::uint64_t bytes = 0;
    while (out.size() < max_count && !lane.closing.empty()) {
        Task task = std::move(lane.closing.front());
        lane.closing.pop_front();
        --task->closing_waiting;
        if (task->dropped) {
            maybe_finish(task);
            continue;
        }
        ++task->posted;
        Slice slice;
        slice.remote = task->confirmed ? task->confirmed->remote : 0;
        slice.task = std::move(task);
        out.push_back(std::move(slice));
    }
    std::size_t skipped = 0;  // in a row
    while (out.size() < max_count && skipped < runnable_.size()) {
        if (inflight + bytes >= may_have && !(inflight == 0 && out.empty())) break;
        Task task = std::move(runnable_.front());
        runnable_.pop_front();
        task->queued = false;
        if (task->dropped || !task->has_data()) continue;
        if (!may_take_next(lane, *task)) {
            make_runnable(task);
            ++skipped;
            continue;
        }
        skipped = 0;
        Slice slice = cut(task);
        bytes += slice.length;
        ++task->posted;
        if (std::find(task->used.begin(), task->used.end(), &lane) == task->used.end()) {
            task->used.push_back(&lane);
        }
        out.push_back(std::move(slice));
        if (task->has_data()) make_runnable(task);
    }
    // It was woken alone, and has no room for all of it.
    if (std::exchange(one_woken_, false) && !runnable_.empty()) wake_lanes();
    add(stats_.slices_posted, out.size());
    add(stats_.bytes_inflight, bytes);
}

void TransferQueue::give_back(Lane& lane, std::vector<Slice>& slices, std::size_t from) {
    const std::lock_guard lock(mutex_);
    for (std::size_t i = slices.size(); i-- > from;) {
        Slice& slice = slices[i];
        const Task task = slice.task;
        --task->posted;
        sub(stats_.slices_posted);
        sub(stats_.bytes_inflight, slice.length);
        if (!slice.is_closing()) {
            if (!task->dropped) {
                task->again.push_back(std::move(slice));
                make_runnable(task);
            }
        } else if (attached(lane)) {
            ++task->closing_waiting;
            lane.closing.push_front(task);
        } else {
            task->closing_failed = true;  // detach() has passed
        }
        maybe_finish(task);
    }
    slices.resize(from);
    if (runnable_.empty()) return;
    for (const auto& other : lanes_) {
        if (other.get() != &lane) other->wake();
    }
}

void TransferQueue::completed(Lane& lane, Slice slice, const verbs::WorkCompletion& wc) {
    const std::lock_guard lock(mutex_);
    const Task task = slice.task;
    --task->posted;
    sub(stats_.bytes_inflight, slice.length);
    if (wc.status == WcStatus::Success) {
        if (slice.is_closing()) {
            --task->closing_missing;
        } else {
            task->bytes_done.fetch_add(slice.length, std::memory_order_relaxed);
            lane.count(slice.length);
            count_completed(lane, slice.length);
            add(task->op == Op::Write ? stats_.bytes_written : stats_.bytes_read, slice.length);
        }
    } else if (is_access_error(wc.status) || is_local_error(wc.status)) {
        TransferEvent why;
        why.status = is_access_error(wc.status) ? TaskStatus::RemoteAccess : TaskStatus::Local;
        why.cause = verbs::wc_status_name(wc.status);
        why.vendor_err = wc.vendor_err;
        why.rail = lane.rail();
        why.address = slice.remote;
        why.length = slice.length;
        drop(*task, std::move(why));
    } else {
        unknown_outcome(task, std::move(slice), lane);
    }
    maybe_finish(task);
}

void TransferQueue::unknown_outcome(const Task& task, Slice slice, const Lane& lane) {
    const Epoch& epoch = lane.epoch();
    const auto found = epochs_.find(epoch);
    const bool fence_due = found == epochs_.end() || !found->second.fenced;
    if (task->dropped) {
        if (fence_due) insert_unique(task->failure.unknown_epochs, epoch);
        if (task->failure.rail.empty()) task->failure.rail = lane.rail();
        return;
    }
    if (fence_due) insert_unique(task->fences, epoch);
    if (slice.is_closing()) {
        task->closing_failed = true;
    } else {
        add(stats_.slices_reposted);
        task->again.push_back(std::move(slice));
        make_runnable(task);
        wake_lanes();
    }
}

void TransferQueue::attach(const std::shared_ptr<Lane>& lane) {
    const std::lock_guard lock(mutex_);
    lanes_.push_back(lane);
    lanes_changed();
    ++epochs_[lane->epoch()].lanes;
    for (const Task& task : all_tasks())
        maybe_finish(task);  // closing requests may wait for a lane
}

bool TransferQueue::attached(const Lane& lane) const {
    return std::any_of(lanes_.begin(), lanes_.end(),
                       [&](const auto& other) { return other.get() == &lane; });
}

void TransferQueue::detach(Lane& lane) {
    const std::lock_guard lock(mutex_);
    std::erase_if(lanes_, [&](const auto& other) { return other.get() == &lane; });
    lanes_changed();
    // It may have been the only one to be woken, or the one to which others left something.
    if (!runnable_.empty()) wake_lanes();
    for (Task& task : std::exchange(lane.closing, {})) {
        --task->closing_waiting;
        task->closing_failed = true;
        maybe_finish(task);
    }
}

void TransferQueue::forget(const Lane& lane) {
    const std::lock_guard lock(mutex_);
    const auto found = epochs_.find(lane.epoch());
    if (--found->second.lanes == 0) epochs_.erase(found);
}

bool TransferQueue::tries_left(const TransferTask& task, std::uint32_t rail) const {
    const auto failures = std::count_if(task.failed_epochs.begin(), task.failed_epochs.end(),
                                        [rail](const Epoch& e) { return e.rail == rail; });
    return static_cast<std::uint32_t>(failures) <= retry_count_;
}

bool TransferQueue::tries_left_elsewhere(const TransferTask& task) const {
    return std::any_of(lanes_.begin(), lanes_.end(),
                       [&](const auto& lane) { return tries_left(task, lane->epoch().rail); });
}

// A rail that has failed too often under a transfer leaves it to those that have not.
bool TransferQueue::may_carry(const Lane& lane, const TransferTask& task) const {
    return task.failed_epochs.empty() || tries_left(task, lane.epoch().rail) ||
           !tries_left_elsewhere(task);
}

// What has devices next to it is left to them, as long as one of them is up and may carry it.
bool TransferQueue::may_take_next(const Lane& lane, const TransferTask& task) const {
    if (!may_carry(lane, task)) return false;
    const LocalRegion* next = task.again.empty() ? task.pieces[task.next_piece].local_region
                                                 : task.again.back().local_region;
    const std::uint64_t nearest = next->spec.nearest;
    const auto is_near = [nearest](const Lane& any) {
        return nearest == 0 || (nearest >> any.local_device() & 1) != 0;
    };
    return is_near(lane) || std::none_of(lanes_.begin(), lanes_.end(), [&](const auto& other) {
               return is_near(*other) && may_carry(*other, task);
           });
}

// What a lane may have outstanding. The end of a transfer waits for what a slow rail has taken, so
// each may have what it completes while the fastest completes its limit: then all are done at about
// the same time. How fast they are, the bytes that they have completed lately tell.
std::uint64_t TransferQueue::window(const Lane& lane, std::uint64_t limit) const {
    if (!several_rails_) return limit;
    std::uint64_t most = 1;
    for (const auto& other : lanes_) most = std::max(most, other->completed_lately);
    const double share = static_cast<double>(lane.completed_lately) / static_cast<double>(most);
    const auto proportional = static_cast<std::uint64_t>(share * static_cast<double>(limit));
    return std::min(limit, std::max(proportional, kFirstWindow));
}

void TransferQueue::count_completed(Lane& lane, std::uint64_t bytes) {
    lane.completed_lately += bytes;
    if (lane.completed_lately < kLatelyBytes) return;
    for (const auto& any : lanes_) any->completed_lately /= 2;
}

void TransferQueue::lanes_changed() {
    several_rails_ = std::any_of(lanes_.begin(), lanes_.end(), [this](const auto& lane) {
        return lane->epoch().rail != lanes_.front()->epoch().rail;
    });
}

void TransferQueue::epoch_down(const Epoch& epoch, const Cause& cause) {
    const std::lock_guard lock(mutex_);
    if (!cause.transport()) return;
    for (const Task& task : all_tasks()) {
        if (task->dropped) continue;
        if (std::find(task->fences.begin(), task->fences.end(), epoch) == task->fences.end()) {
            continue;
        }
        insert_unique(task->failed_epochs, epoch);
        // It goes on where it has not failed too often, if anything of that is up.
        if (tries_left(*task, epoch.rail) || tries_left_elsewhere(*task)) continue;
        TransferEvent why;
        why.status = TaskStatus::RetryExceeded;
        why.cause = cause.name();
        why.vendor_err = cause.vendor_err;
        why.rail = cause.rail;
        if (!task->again.empty()) {
            why.address = task->again.back().remote;
            why.length = task->again.back().length;
        }
        drop(*task, std::move(why));
        maybe_finish(task);
    }
}

void TransferQueue::fenced(const Epoch& epoch) {
    const std::lock_guard lock(mutex_);
    if (const auto found = epochs_.find(epoch); found != epochs_.end()) {
        found->second.fenced = true;
    }
    for (const Task& task : all_tasks()) {
        if (std::erase(task->fences, epoch) != 0) maybe_finish(task);
    }
}

void TransferQueue::cancel(TransferTask& task) {
    const std::lock_guard lock(mutex_);
    const auto found = tasks_.find(&task);
    if (found == tasks_.end()) return;
    const Task held = found->second;
    TransferEvent why;
    why.status = TaskStatus::Cancelled;
    drop(*held, std::move(why));
    maybe_finish(held);
}

std::shared_ptr<TransferTask> TransferQueue::take_back(Waiter& waiter) {
    const std::lock_guard lock(mutex_);
    switch (waiter.stage_) {
        case Waiter::Stage::Submitted:
            waiter.stage_ = Waiter::Stage::OnRing;
            waiter.task_->waiter.reset();
            return waiter.task_;
        case Waiter::Stage::OnRing:
            return waiter.task_;
        case Waiter::Stage::Fresh:
            waiter.stage_ = Waiter::Stage::Refused;
            return nullptr;
        case Waiter::Stage::Landed:
        case Waiter::Stage::Refused:
            return nullptr;
    }
    return nullptr;
}

void TransferQueue::lose() {
    const std::lock_guard lock(mutex_);
    lost_ = true;
    runnable_.clear();
    for (const Task& task : all_tasks()) {
        TransferEvent why;
        why.status = TaskStatus::Lost;
        drop(*task, std::move(why));
        maybe_finish(task);
    }
}

void TransferQueue::drop(TransferTask& task, TransferEvent why) {
    if (task.dropped || task.finished) return;  // the first reason stays
    task.dropped = true;
    why.unknown_epochs = std::exchange(task.fences, {});
    task.failure = std::move(why);
    task.again.clear();
}

void TransferQueue::start_closing(const Task& task) {
    std::vector<Lane*> targets;
    for (const auto& lane : lanes_) {
        if (std::find(task->used.begin(), task->used.end(), lane.get()) != task->used.end()) {
            targets.push_back(lane.get());
        }
    }
    for (auto lane = lanes_.begin(); targets.empty() && lane != lanes_.end(); ++lane) {
        if (may_carry(**lane, *task)) targets.push_back(lane->get());
    }
    if (targets.empty()) return;  // attach() comes back to it
    task->closing_started = true;
    task->closing_failed = false;
    task->closing_waiting = task->closing_missing = static_cast<std::uint32_t>(targets.size());
    if (task->imm != 0) {
        task->imm_count.store(task->closing_missing, std::memory_order_relaxed);
    }
    for (Lane* lane : targets) {
        lane->closing.push_back(task);
        lane->wake();
    }
}

void TransferQueue::maybe_finish(const Task& task) {
    if (task->finished || task->posted != 0) return;
    if (task->dropped) {
        if (task->closing_waiting == 0) finish(task);
        return;
    }
    if (task->has_data()) return;
    if (task->has_closing()) {
        if (!task->closing_started || (task->closing_failed && task->closing_waiting == 0)) {
            start_closing(task);
            return;
        }
        if (task->closing_missing != 0) return;
    }
    if (task->fences.empty()) finish(task);
}

void TransferQueue::finish(const Task& task) {
    task->finished = true;
    task->uses.release();
    sub(stats_.transfers_inflight);
    const Task held = task;  // `task` may be the map's own reference
    tasks_.erase(held.get());
    const std::shared_ptr<Waiter> waiter = std::move(held->waiter);  // until it has been opened
    if (held->dropped) {
        if (waiter) waiter->stage_ = Waiter::Stage::OnRing;
        add(stats_.transfers_failed);
        held->failure.id = held->id;
        ring_.push(std::move(held->failure));
    } else {
        add(stats_.transfers_done);
        if (waiter) {
            waiter->stage_ = Waiter::Stage::Landed;
            waiter->open();
        } else {
            ring_.push_done(held->id);
        }
    }
}

std::vector<TransferQueue::Task> TransferQueue::all_tasks() const {
    std::vector<Task> all;
    all.reserve(tasks_.size());
    for (const auto& [key, task] : tasks_) all.push_back(task);
    return all;
}

}  // namespace aioflagcx::engine
