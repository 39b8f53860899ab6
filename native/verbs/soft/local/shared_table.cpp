#include "verbs/soft/local/shared_table.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <iterator>
#include <string_view>
#include <thread>
#include <utility>

#include "common/error.h"
#include "verbs/soft/local/packets.h"

namespace aioflagcx::verbs::soft::local {

namespace {

// Until `quiet()`, which a running process brings about within a copy's time, or until its guest
// has ended or is stopped, which costs system calls to know.
template <typename Quiet>
bool wait_for(const LocalGuest& guest, Quiet quiet, Deadline deadline) {
    for (int i = 0; i < kLooks; ++i) {
        if (quiet()) return true;
    }
    Clock::duration nap = kFirstNap;
    while (!quiet() && !guest.gone()) {
        const auto now = Clock::now();
        if (guest.stopped(now)) return true;
        if (now >= deadline) return false;
        std::this_thread::sleep_for(std::min(nap, deadline - now));
        nap = std::min<Clock::duration>(2 * nap, kLongestNap);
    }
    return true;
}

// The state of a thread as proc(5) gives it, or a space.
char thread_state(pid_t pid, std::uint32_t thread) noexcept {
    std::array<char, 64> path;
    std::snprintf(path.data(), path.size(), "/proc/%d/task/%u/stat", pid, thread);
    const UniqueFd file(::open(path.data(), O_RDONLY | O_CLOEXEC));
    std::array<char, 128> text;  // the name before the state has at most 64 characters
    const ssize_t got = file ? ::read(file.get(), text.data(), text.size()) : 0;
    const std::string_view stat(text.data(), got > 0 ? static_cast<std::size_t>(got) : 0);
    const std::size_t name_end = stat.rfind(')');
    return name_end != stat.npos && name_end + 2 < stat.size() ? stat[name_end + 2] : ' ';
}

}  // namespace

// ---- LocalGuest ------------------------------------------------------------------------------

LocalGuest::LocalGuest(std::shared_ptr<SharedTable> table, UniqueFd& control, UniqueFd process,
                       pid_t pid)
    : table_(std::move(table)),
      process_(std::move(process)),
      pid_(pid),
      gate_(table_->take_gate()),
      ticket_(table_->next_ticket()) {
    try {
        page_file_ = create_memory_file("aioflagcx-announcements", sizeof(Announcement));
        page_ = Mapping(page_file_.get(), sizeof(Announcement), true);
    } catch (...) {
        table_->free_gate(gate_);
        throw;
    }
    control_ = std::move(control);
    table_->table().gates[gate_].store(ticket_, std::memory_order_seq_cst);
}

LocalGuest::~LocalGuest() {
    close();
    table_->free_gate(gate_);
}

void LocalGuest::close() noexcept {
    if (closed_.exchange(true, std::memory_order_acq_rel)) return;
    table_->table().gates[gate_].store(0, std::memory_order_seq_cst);
    table_->table().revocations.fetch_add(1, std::memory_order_seq_cst);
}

bool LocalGuest::busy() const noexcept {
    const auto& page = *static_cast<const Announcement*>(page_.get());
    return page.count.load(std::memory_order_seq_cst) != 0;
}

bool LocalGuest::uses(std::uint32_t key) const noexcept {
    const auto& page = *static_cast<const Announcement*>(page_.get());
    // Whatever the other process writes there, no more than there is gets read.
    const std::size_t count =
        std::min<std::size_t>(page.count.load(std::memory_order_seq_cst), kAnnouncedKeys);
    for (std::size_t i = 0; i < count; ++i) {
        if (page.keys[i].load(std::memory_order_acquire) == key) return true;
    }
    return false;
}

bool LocalGuest::gone() const noexcept {
    // The connection ends with the process's last thread, or when it becomes another program by
    // execve(2), which ends its other threads and their copies first.
    pollfd entries[] = {{process_.get(), POLLIN, 0}, {control_.get(), 0, 0}};
    return ::poll(entries, std::size(entries), 0) > 0;
}

bool LocalGuest::stopped(Clock::time_point now) const noexcept {
    // A later announcement than the one that is waited for may have another thread; then the one
    // before it is over.
    const std::uint32_t thread =
        static_cast<const Announcement*>(page_.get())->thread.load(std::memory_order_seq_cst);
    // Not 't': a tracer stops a thread in front of a system call, too, which it then goes on with.
    if (thread == 0 || thread_state(pid_, thread) != 'T') {
        stopped_since_.store(Deadline::max(), std::memory_order_relaxed);
        return false;
    }
    Clock::time_point since = stopped_since_.load(std::memory_order_relaxed);
    if (since == Deadline::max()) {
        since = now;
        stopped_since_.store(now, std::memory_order_relaxed);
    }
    return now - since >= kStoppedFor;
}

bool LocalGuest::wait_idle(Deadline deadline) const {
    return wait_for(*this, [this] { return !busy(); }, deadline);
}

void LocalGuest::lend(std::uint32_t key) {
    const std::lock_guard lock(mutex_);
    lent_.insert(key);
}

void LocalGuest::recall(std::uint32_t key) noexcept {
    {
        const std::lock_guard lock(mutex_);
        if (lent_.erase(key) == 0) return;
    }
    Message message;
    message.kind = Kind::Recall;
    message.key = key;
    // One that does not read keeps its mapping until it does; the region is closed to it anyway.
    // When there is no room for more messages, their end says the same.
    if (!send_message(control_.get(), message, {})) ::shutdown(control_.get(), SHUT_WR);
}

// ---- SharedTable -----------------------------------------------------------------------------

SharedTable::SharedTable()
    : file_(create_memory_file("aioflagcx-regions", sizeof(Table))),
      map_(file_.get(), sizeof(Table), true),
      read_only_(share_read_only(file_.get())) {}

void SharedTable::publish(std::uint32_t key, std::uint64_t addr, std::uint64_t length,
                          std::uint32_t access, bool mappable) noexcept {
    Entry& entry = table().entries[slot_of(key)];
    entry.addr.store(addr, std::memory_order_relaxed);
    entry.length.store(length, std::memory_order_relaxed);
    entry.access.store(access, std::memory_order_relaxed);
    entry.mappable.store(mappable ? 1 : 0, std::memory_order_relaxed);
    entry.tag.store(open_tag(key), std::memory_order_seq_cst);
}

void SharedTable::withdraw(std::uint32_t key) noexcept {
    table().entries[slot_of(key)].tag.store(0, std::memory_order_seq_cst);
    table().revocations.fetch_add(1, std::memory_order_seq_cst);
    for (const auto& guest : guests()) guest->recall(key);
}

bool SharedTable::wait_unused(std::uint32_t key, Deadline deadline) {
    for (const auto& guest : guests()) {
        if (!wait_for(*guest, [&] { return !guest->uses(key); }, deadline)) return false;
    }
    return true;
}

std::shared_ptr<LocalGuest> SharedTable::admit(UniqueFd& control, UniqueFd process, pid_t pid) {
    guests();  // their gates may be needed
    auto guest = std::make_shared<LocalGuest>(shared_from_this(), control, std::move(process), pid);
    const std::lock_guard lock(mutex_);
    guests_.push_back(guest);
    return guest;
}

void SharedTable::shut() noexcept {
    std::vector<std::shared_ptr<LocalGuest>> all;
    {
        const std::lock_guard lock(mutex_);
        all.swap(guests_);
    }
    for (const auto& guest : all) guest->close();
}

// Those that may still be inside a copy; forgets the others.
std::vector<std::shared_ptr<LocalGuest>> SharedTable::guests() {
    std::vector<std::shared_ptr<LocalGuest>> forgotten;  // freed without the lock
    std::vector<std::shared_ptr<LocalGuest>> all;
    const std::lock_guard lock(mutex_);
    for (auto& guest : guests_) {
        const bool finished = guest->closed() && (!guest->busy() || guest->gone());
        (finished ? forgotten : all).push_back(std::move(guest));
    }
    guests_ = all;
    return all;
}

std::uint32_t SharedTable::take_gate() {
    const std::lock_guard lock(mutex_);
    if (!free_gates_.empty()) {
        const std::uint32_t gate = free_gates_.back();
        free_gates_.pop_back();
        return gate;
    }
    if (next_gate_ == kLocalGates) {
        throw NativeError("accept", ENOSPC,
                          std::to_string(kLocalGates) + " local queue pairs are connected");
    }
    return next_gate_++;
}

std::uint32_t SharedTable::next_ticket() {
    const std::lock_guard lock(mutex_);
    if (++last_ticket_ == 0) ++last_ticket_;  // 0 is a closed gate
    return last_ticket_;
}

void SharedTable::free_gate(std::uint32_t gate) noexcept {
    const std::lock_guard lock(mutex_);
    free_gates_.push_back(gate);
}

}  // namespace aioflagcx::verbs::soft::local
