// The target's side of the local path's shared memory: its MR table as initiators in other
// processes see it, and the page in which each of them announces what it uses.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <unordered_set>
#include <vector>

#include "common/unique_fd.h"
#include "verbs/soft/local/layout.h"
#include "verbs/soft/local/memory_file.h"
#include "verbs/soft/token.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft::local {

class SharedTable;

// One initiator QP of another process (or of this one), while it is connected, and beyond that
// while it may still be inside a copy.
//
// Announce, check, copy: the initiator stores the keys in its announcement (seq_cst), then looks
// at its gate and at the keys' entries, copies, and clears the announcement. Who takes a gate or
// entry away stores that (seq_cst), counts it, and then waits until the announcement does not hold
// it. As with Gate, at least one of the two sees the other. A process that has ended announces
// nothing. Nor does one whose end of the connection is closed: that happens between copies, or with
// all of the process's threads, by execve(2), say. And a thread that is stopped, and whose copies
// are guarded (guarded_copy.h), will not go on with what it had looked at before that was counted.
class LocalGuest {
  public:
    // `control` carries messages to the initiator, and is taken unless this throws; `process` is
    // its pidfd. Its gate is open.
    LocalGuest(std::shared_ptr<SharedTable> table, UniqueFd& control, UniqueFd process, pid_t pid);
    ~LocalGuest();

    int control_fd() const noexcept { return control_.get(); }
    int process_fd() const noexcept { return process_.get(); }
    pid_t pid() const noexcept { return pid_; }
    // Where its gate is in the table, and what lies there while it is open: another guest that
    // gets the place later has another ticket.
    std::uint32_t gate() const noexcept { return gate_; }
    std::uint32_t ticket() const noexcept { return ticket_; }
    int page_fd() const noexcept { return page_file_.get(); }
    SharedTable& table() const noexcept { return *table_; }

    // It may use nothing any more; what it is using now it may use to the end.
    void close() noexcept;
    bool closed() const noexcept { return closed_.load(std::memory_order_acquire); }

    // Whether it is inside a copy (with `key`) just now.
    bool busy() const noexcept;
    bool uses(std::uint32_t key) const noexcept;
    bool gone() const noexcept;  // it will copy no more: its process has ended, or its connection
    // Whether the thread that announced it, and its copy with it, has been stopped for a while at
    // the time `now`.
    bool stopped(Clock::time_point now) const noexcept;

    // False at the deadline: it is stopped inside a copy that is not guarded.
    bool wait_idle(Deadline deadline) const;

    // It asked for the region's file and got it: it is told when the region goes.
    void lend(std::uint32_t key);
    void recall(std::uint32_t key) noexcept;

  private:
    const std::shared_ptr<SharedTable> table_;
    UniqueFd control_;
    const UniqueFd process_;
    const pid_t pid_;
    const std::uint32_t gate_;
    const std::uint32_t ticket_;
    UniqueFd page_file_;
    Mapping page_;
    std::atomic<bool> closed_{false};
    mutable std::atomic<Clock::time_point> stopped_since_{Deadline::max()};  // by all looks so far

    std::mutex mutex_;  // guards lent_; a leaf
    std::unordered_set<std::uint32_t> lent_;
};

class SharedTable : public std::enable_shared_from_this<SharedTable> {
  public:
    SharedTable();

    const Token& name() const noexcept { return name_; }
    // What initiators get: a descriptor that cannot write.
    int fd() const noexcept { return read_only_.get(); }

    void publish(std::uint32_t key, std::uint64_t addr, std::uint64_t length, std::uint32_t access,
                 bool mappable) noexcept;
    // No new use; guests that map it are told to let go.
    void withdraw(std::uint32_t key) noexcept;
    // After withdraw(): false at the deadline, when a guest is stopped inside a copy with it that
    // is not guarded.
    bool wait_unused(std::uint32_t key, Deadline deadline);

    // No guest may use anything any more, and none is kept.
    void shut() noexcept;

    // A new guest, as its constructor says. Throws NativeError.
    std::shared_ptr<LocalGuest> admit(UniqueFd& control, UniqueFd process, pid_t pid);

  private:
    friend class LocalGuest;
    Table& table() const noexcept { return *static_cast<Table*>(map_.get()); }
    std::uint32_t take_gate();
    std::uint32_t next_ticket();
    void free_gate(std::uint32_t gate) noexcept;
    std::vector<std::shared_ptr<LocalGuest>> guests();

    const Token name_ = random_token();
    UniqueFd file_;
    Mapping map_;
    UniqueFd read_only_;

    std::mutex mutex_;  // guards what follows; a leaf
    // Held while connected by their responders; kept here while they may be inside a copy.
    std::vector<std::shared_ptr<LocalGuest>> guests_;
    std::vector<std::uint32_t> free_gates_;
    std::uint32_t next_gate_ = 0;
    std::uint32_t last_ticket_ = 0;
};

}  // namespace aioflagcx::verbs::soft::local
