// Registered memory: keys, the table that finds them, and pins that hold a region for one use.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <shared_mutex>
#include <unordered_map>
#include <vector>

#include "verbs/soft/gate.h"
#include "verbs/soft/limits.h"
#include "verbs/soft/local/shared_table.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

// One registered range. Its gate is open as long as it is registered.
struct MrEntry {
    MrEntry(std::uint64_t addr_, std::uint64_t length_, std::uint32_t access_,
            const SharedMemory& shared_) noexcept
        : addr(addr_), length(length_), access(access_), shared(shared_) {}

    bool covers(std::uint64_t start, std::uint64_t size) const noexcept {
        return start >= addr && size <= length && start - addr <= length - size;
    }
    bool grants(std::uint64_t start, std::uint64_t size, std::uint32_t needed) const noexcept {
        return (access & needed) == needed && covers(start, size);
    }

    const std::uint64_t addr;
    const std::uint64_t length;
    const std::uint32_t access;
    const SharedMemory shared;
    std::uint32_t key = 0;  // set once, before anybody else sees the entry
    Gate gate{Gate::State::Open};
};

// Shared, because a thread may still be leaving the gate when the region's owner is gone.
using MrRef = std::shared_ptr<MrEntry>;

// The keys of one protection domain.
class MrTable {
  public:
    // `shared`: with a copy of it that initiators of the local path map.
    explicit MrTable(bool shared);
    ~MrTable();

    MrRef add(std::uint64_t addr, std::uint64_t length, std::uint32_t access,
              const SharedMemory& shared);
    // Closes the entry: nobody is inside its gate any more. Peers of the local path may be.
    void close(const MrRef& entry);
    // After close(). False at the deadline: a peer is stopped inside a copy.
    bool wait_unused(const MrRef& entry, Deadline deadline);
    // `quiet`: as wait_unused() said. If not, its place is never used again.
    void remove(const MrRef& entry, bool quiet);
    MrRef find(std::uint32_t key) const;

    local::SharedTable* shared() const noexcept { return shared_.get(); }

  private:
    const std::shared_ptr<local::SharedTable> shared_;
    // Guards what follows. Innermost: nothing else is taken while it is held.
    mutable std::shared_mutex mutex_;
    std::unordered_map<std::uint32_t, MrRef> entries_;
    std::vector<bool> taken_;  // places in the shared table, if there is one
    std::uint32_t next_;       // counts up from a random start; a key comes again after 2^32 others
};

// The last used keys of one thread's object, in front of the table's lock. Keys are not reused
// while an entry is open, so an open entry found here is the one the table holds.
class MrCache {
  public:
    explicit MrCache(std::shared_ptr<const MrTable> table) noexcept : table_(std::move(table)) {}

    // The open entry with this key, or null; the reference is good until the next call.
    const MrRef& find(std::uint32_t key);

  private:
    std::shared_ptr<const MrTable> table_;
    std::array<MrRef, kMrCacheSlots> slots_;
};

// The regions one system call or copy uses, inside their gates until it is destroyed.
class PinSet {
  public:
    PinSet() = default;
    ~PinSet();
    PinSet(const PinSet&) = delete;
    PinSet& operator=(const PinSet&) = delete;

    // Whether add() of another region than the last would be one too many.
    bool full() const noexcept { return count_ == pinned_.size(); }
    // False when the region has been taken away. Takes at most kFrameRequests different regions.
    bool add(const MrRef& entry) noexcept;

  private:
    std::array<MrRef, kFrameRequests> pinned_;
    std::size_t count_ = 0;
};

// What the initiator can tell of a request without its peer.
WcStatus check_local(MrCache& cache, const SendWr& wr);

std::unique_ptr<MemoryRegion> make_memory_region(std::shared_ptr<MrTable> table, std::uint64_t addr,
                                                 std::uint64_t length, std::uint32_t access,
                                                 const SharedMemory& shared);

}  // namespace aioflagcx::verbs::soft
