#include "verbs/soft/local/initiator.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <utility>

#include "verbs/soft/limits.h"
#include "verbs/soft/mapped.h"

namespace aioflagcx::verbs::soft::local {

namespace {

std::uint64_t address(const iovec& piece) noexcept {
    return reinterpret_cast<std::uint64_t>(piece.iov_base);
}

}  // namespace

LocalInitiator::LocalInitiator(const Init& init, std::unique_ptr<Connection> connection)
    : Initiator(init),
      connection_(std::move(connection)),
      stream_(connection_->take_stream(), queue_, mrs_, *this) {
    const std::pair<int, EventSink*> watched[] = {{stream_.fd(), &stream_},
                                                  {connection_->control_fd(), &control_},
                                                  {connection_->process_fd(), &process_}};
    const std::lock_guard lock(cq_.progress_mutex());
    std::size_t count = 0;
    try {
        for (; count < std::size(watched); ++count) {
            cq_.watch(watched[count].first, *watched[count].second);
        }
    } catch (...) {
        while (count > 0) cq_.unwatch(watched[--count].first);
        throw;
    }
}

void LocalInitiator::close_path() noexcept {
    if (!connection_) return;
    for (const int fd : {stream_.fd(), connection_->control_fd(), connection_->process_fd()}) {
        cq_.unwatch(fd);
    }
    stream_.close();
    connection_.reset();
}

void LocalInitiator::receive() {
    // The stream first: it may say why the target has left.
    if (stream_.readable() && !settle(stream_.receive())) return;
    if (std::exchange(control_.pending, false) && !connection_->receive()) {
        return fail_oldest(WcStatus::RetryExcErr, ECONNRESET);
    }
    if (std::exchange(process_.pending, false)) {
        if (const int loss = connection_->loss()) fail_oldest(WcStatus::RetryExcErr, loss);
    }
}

void LocalInitiator::pump() {
    if (stream_.busy()) {
        std::size_t budget = kTurnBytes;
        if (!settle(stream_.send(budget))) return;
        if (budget == 0) stream_ready();
    }
    while (queue_.may_start()) {
        if (queue_.next_is_alone()) {
            if (!stream_.idle()) return;  // an edge tells when it takes more
            if (!send_alone()) return;
        } else if (!copy_run()) {
            return;
        }
    }
}

bool LocalInitiator::settle(const std::optional<StreamFailure>& failure) {
    if (!failure) return true;
    if (failure->seq) {
        fail(*failure->seq, failure->status, failure->error);
    } else {
        fail_oldest(failure->status, failure->error);
    }
    return false;
}

bool LocalInitiator::send_alone() {
    const std::uint64_t seq = queue_.next();
    const WcStatus local = queue_.local_error(seq);
    if (local != WcStatus::Success) {
        fail(seq, local);
        return false;
    }
    stream_.append(seq);
    queue_.start();
    std::size_t budget = kTurnBytes;
    if (!settle(stream_.send(budget))) return false;
    if (budget == 0) stream_ready();
    return true;
}

// ---- Copies ----------------------------------------------------------------------------------

bool LocalInitiator::copy_run() {
    first_ = queue_.next();
    offset_ = 0;
    const std::uint64_t end = start_run();
    while (first_ != end) {
        if (!copy_chunk(end)) return false;
    }
    return true;
}

// Starts requests of one opcode for about one call.
std::uint64_t LocalInitiator::start_run() {
    const WrOpcode opcode = queue_.request(first_).opcode;
    reading_ = opcode == WrOpcode::RdmaRead;
    std::uint64_t bytes = 0;
    do {
        bytes += queue_.request(queue_.next()).sge.length;
        queue_.start();
    } while (queue_.next() - first_ < kCallPieces && bytes < kCallBytes && queue_.may_start() &&
             !queue_.next_is_alone() && queue_.request(queue_.next()).opcode == opcode);
    return queue_.next();
}

bool LocalInitiator::copy_chunk(std::uint64_t end) {
    // A pid may come to name another process, but not before its own has ended.
    if (const int loss = connection_->loss()) return fail_copy(loss);
    PinSet pins;
    std::size_t count = gather(end, pins);
    if (count == 0) {
        fail(first_, WcStatus::LocProtErr);
        return false;
    }
    announce();
    // Before the looks at gate and keys: what is taken away after them counts beyond this.
    const Guard guard = connection_->guard();
    int error = 0;
    std::size_t copied = 0;
    const bool open = connection_->gate_open();
    if (open) {
        count = check_remote(count);
        // If something was taken away meanwhile, the rest is looked at anew.
        copy(guard, count, &copied, &error);
    }
    withdraw();
    if (!open) return fail_copy(ECONNRESET);
    if (count == 0) {
        fail(first_, WcStatus::RemAccessErr);
        return false;
    }
    finish_copied(copied);
    return error == 0 || fail_copy(error);
}

// How many pieces lie in local regions that are registered still; they are in `pins`.
std::size_t LocalInitiator::gather(std::uint64_t end, PinSet& pins) {
    const std::uint32_t access = reading_ ? kAccessLocalWrite : 0;
    std::uint64_t bytes = 0;
    std::uint64_t offset = offset_;
    std::size_t count = 0;
    key_count_ = 0;
    for (std::uint64_t seq = first_; seq != end && count < kCallPieces && bytes < kCallBytes;
         ++seq) {
        const SendWr& wr = queue_.request(seq);
        const std::uint64_t size =
            std::min<std::uint64_t>(wr.sge.length - offset, kCallBytes - bytes);
        if (size != 0) {
            const MrRef& entry = mrs_.find(wr.sge.lkey);
            if (pins.full() || !entry || !entry->grants(wr.sge.addr, wr.sge.length, access)) break;
            const auto used = keys_.begin() + static_cast<std::ptrdiff_t>(key_count_);
            if (std::find(keys_.begin(), used, wr.rkey) == used) {
                if (key_count_ == keys_.size()) break;
                keys_[key_count_++] = wr.rkey;
            }
            if (!pins.add(entry)) break;
        }
        here_[count] = {reinterpret_cast<void*>(wr.sge.addr + offset), size};
        there_[count] = {reinterpret_cast<void*>(wr.remote_addr + offset), size};
        ++count;
        bytes += size;
        offset = 0;
    }
    return count;
}

void LocalInitiator::announce() noexcept {
    Announcement& page = connection_->announcement();
    // Release: a look at the keys that sees one of these finds the copy before them done.
    for (std::size_t i = 0; i < key_count_; ++i) {
        page.keys[i].store(keys_[i], std::memory_order_release);
    }
    // At least 1, since it also stands for the QP, whose gate is looked at next.
    const bool guarded = connection_->same_ids() && copies_are_guarded();
    page.thread.store(guarded ? static_cast<std::uint32_t>(::gettid()) : 0,
                      std::memory_order_release);
    page.count.store(static_cast<std::uint32_t>(std::max<std::size_t>(key_count_, 1)),
                     std::memory_order_seq_cst);
}

void LocalInitiator::withdraw() noexcept {
    connection_->announcement().count.store(0, std::memory_order_release);
}

// The region, if the target grants the access. The entry cannot change while it is announced.
std::optional<LocalInitiator::Remote> LocalInitiator::find_remote(std::uint32_t key) {
    const std::uint32_t needed = reading_ ? kAccessRemoteRead : kAccessRemoteWrite;
    const Entry& entry = connection_->table().entries[slot_of(key)];
    if (entry.tag.load(std::memory_order_seq_cst) != open_tag(key)) return std::nullopt;
    if ((entry.access.load(std::memory_order_relaxed) & needed) != needed) return std::nullopt;
    const bool mappable = entry.mappable.load(std::memory_order_relaxed) != 0;
    return Remote{entry.addr.load(std::memory_order_relaxed),
                  entry.length.load(std::memory_order_relaxed),
                  mappable ? connection_->find_mapped(key) : nullptr};
}

// How many of the pieces the target grants.
std::size_t LocalInitiator::check_remote(std::size_t count) {
    std::uint32_t key = 0;
    std::optional<Remote> remote;
    for (std::size_t i = 0; i < count; ++i) {
        const SendWr& wr = queue_.request(first_ + i);
        mapped_[i] = nullptr;
        if (there_[i].iov_len == 0) continue;
        if (!remote || key != wr.rkey) {
            key = wr.rkey;
            remote = find_remote(key);
        }
        if (!remote || !remote->covers(wr.remote_addr, wr.sge.length)) return i;
        if (remote->window != nullptr) {
            mapped_[i] = remote->window + (address(there_[i]) - remote->addr);
        }
    }
    return count;
}

// A copy of its own, between those of the queue, which is empty.
bool LocalInitiator::execute_now(const SendWr& wr) {
    if (wr.sge.length == 0 || wr.sge.length > kCallBytes || connection_->loss() != 0) {
        return false;
    }
    reading_ = wr.opcode == WrOpcode::RdmaRead;
    PinSet pins;
    const MrRef& entry = mrs_.find(wr.sge.lkey);
    if (!entry || !pins.add(entry)) return false;
    keys_[0] = wr.rkey;
    key_count_ = 1;
    announce();
    const Guard guard = connection_->guard();
    std::size_t copied = 0;
    if (connection_->gate_open()) {
        const auto remote = find_remote(wr.rkey);
        if (remote && remote->covers(wr.remote_addr, wr.sge.length)) {
            here_[0] = {reinterpret_cast<void*>(wr.sge.addr), wr.sge.length};
            there_[0] = {reinterpret_cast<void*>(wr.remote_addr), wr.sge.length};
            mapped_[0] = remote->window == nullptr
                             ? nullptr
                             : remote->window + (wr.remote_addr - remote->addr);
            int error = 0;
            copy(guard, 1, &copied, &error);
        }
    }
    withdraw();
    return copied == wr.sge.length;
}

// False when something was taken away before the end: `copied` bytes are copied. Fewer than asked
// for also with a reason, or because the kernel stopped early.
bool LocalInitiator::copy(const Guard& guard, std::size_t count, std::size_t* copied, int* error) {
    for (std::size_t i = 0; i < count;) {
        if (mapped_[i] != nullptr) {
            void* const here = here_[i].iov_base;
            if (!guarded_copy(guard, reading_ ? here : mapped_[i], reading_ ? mapped_[i] : here,
                              here_[i].iov_len)) {
                return false;
            }
            *copied += here_[i++].iov_len;
            continue;
        }
        std::size_t to = i;
        std::size_t wanted = 0;
        for (; to < count && mapped_[to] == nullptr; ++to) wanted += here_[to].iov_len;
        ssize_t got = 0;
        if (wanted != 0 && !guarded_call(guard, reading_, connection_->pid(), {&here_[i], to - i},
                                         {&there_[i], to - i}, &got)) {
            return false;
        }
        if (got < 0) {
            *error = errno;
            return true;
        }
        *copied += static_cast<std::size_t>(got);
        if (static_cast<std::size_t>(got) != wanted) return true;
        i = to;
    }
    return true;
}

// Requests of no bytes are finished with those before them.
void LocalInitiator::finish_copied(std::size_t bytes) {
    while (first_ != queue_.next()) {
        const std::uint64_t left = queue_.request(first_).sge.length - offset_;
        if (left > bytes) {
            offset_ += bytes;
            return;
        }
        bytes -= left;
        offset_ = 0;
        queue_.finish(first_++);
    }
}

bool LocalInitiator::fail_copy(int error) {
    if (error != EFAULT) {  // the process is gone, or forbids it now
        fail_oldest(WcStatus::RetryExcErr, error);
        return false;
    }
    const Sge& sge = queue_.request(first_).sge;
    WcStatus status = WcStatus::RemOpErr;  // registered, but no longer mapped
    try {
        require_mapped(sge.addr, sge.length, reading_);
    } catch (const NativeError&) {
        status = WcStatus::LocProtErr;
    }
    fail(first_, status);
    return false;
}

}  // namespace aioflagcx::verbs::soft::local
