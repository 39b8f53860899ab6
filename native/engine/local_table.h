// The engine's own registered memory: what transfers use and what peers are told.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "engine/address_index.h"
#include "engine/allocation.h"
#include "engine/table_codec.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

struct RegionSpec {
    std::uint64_t addr = 0;
    std::uint64_t size = 0;
    std::uint32_t access = 0;  // kTableAccess*, what peers may do
    bool local_writable = true;
    std::optional<std::string> name;
    std::uint64_t nearest = 0;  // devices next to it, bit by bit; 0: any
};

// A lookup may ask for this bit besides kTableAccess*: the local end of an RDMA_READ.
inline constexpr std::uint32_t kLocalWritable = 1u << 31;

struct LocalRegion {
    std::uint64_t id = 0;
    RegionSpec spec;
    std::uint64_t chunk_size = 0;
    std::uint64_t added = 0;                                // generation
    std::shared_ptr<Allocation> allocation;                 // that the range lies in, if any
    std::vector<std::unique_ptr<verbs::MemoryRegion>> mrs;  // device-major x chunk
    bool freeing = false;  // somebody is at it; guarded by the table's mutex
    bool read_after_write = false;

    // Transfers of ours that hold slices in this region. A user increments, then reads `revoked`
    // and steps back when it is set; deregistration sets `revoked`, then waits for zero. Both
    // seq_cst, so one of the two sees the other.
    std::atomic<std::uint32_t> users{0};
    std::atomic<bool> revoked{false};

    std::uint64_t chunks() const noexcept { return (spec.size - 1) / chunk_size + 1; }
    const verbs::MemoryRegion& mr(std::uint32_t device, std::uint64_t addr) const noexcept {
        return *mrs[device * chunks() + (addr - spec.addr) / chunk_size];
    }
};

// Lock: mutex_ guards every member below it; a leaf, except that registration and deregistration
// call into devices without holding it.
class LocalTable {
  public:
    // What lookups work on: never changes once made.
    struct Snapshot {
        AddressIndex index;
        std::vector<std::shared_ptr<LocalRegion>> regions;  // by position in the index
    };

    explicit LocalTable(std::vector<verbs::ProtectionDomain*> domains, std::uint64_t max_mr_size);

    // All or nothing; much memory on all devices at the same time. Throws NativeError naming the
    // range.
    std::vector<std::uint64_t> add(std::span<const RegionSpec> specs);

    // No new user, and gone from what peers are told. Unknown ids are ignored.
    void revoke(std::span<const std::uint64_t> ids);

    // revoke(), wait for users here and in peers, then free the MRs. False at the deadline; call
    // again to go on. True means freed, also when another call is doing that.
    bool remove(std::span<const std::uint64_t> ids, verbs::Deadline deadline);

    // Frees every MR. To be called when nothing is or will be posted: requests that were never
    // submitted may still be users. The regions that a stopped peer is still inside of at the
    // deadline; they are out of this table's hands, and their memory must not be used again.
    std::vector<std::uint64_t> close(verbs::Deadline deadline);

    std::shared_ptr<const Snapshot> snapshot();

    static bool acquire(LocalRegion& region) noexcept;
    void release(LocalRegion& region) noexcept;

    struct Changes {
        bool full = true;
        std::uint64_t base = 0;
        std::uint64_t generation = 0;
        std::string table;
        std::string removed;  // u64 ids
    };
    Changes since(std::uint64_t generation);

    std::uint64_t generation();
    std::size_t size();
    std::optional<TableRecord> find(std::uint64_t id, std::string* name);
    // What a live region's byte at `addr` is reached by on the first device.
    std::optional<std::uint32_t> rkey(std::uint64_t id, std::uint64_t addr);
    std::vector<std::uint64_t> ids();

  private:
    bool free_region(std::unique_lock<std::mutex>& lock, LocalRegion& region,
                     verbs::Deadline deadline);
    std::shared_ptr<LocalRegion> prepare(const RegionSpec& spec) const;
    void register_all(const std::vector<std::shared_ptr<LocalRegion>>& regions) const;
    static std::vector<std::unique_ptr<verbs::MemoryRegion>> register_on(
        verbs::ProtectionDomain& domain, const LocalRegion& region);
    void append_record(TableData& data, const LocalRegion& region) const;

    const std::vector<verbs::ProtectionDomain*> domains_;
    const std::uint64_t max_mr_size_;

    std::mutex mutex_;
    std::condition_variable unused_;  // some revoked region lost its last user, or was freed
    std::map<std::uint64_t, std::shared_ptr<LocalRegion>> live_;     // told to peers; by id
    std::map<std::uint64_t, std::shared_ptr<LocalRegion>> revoked_;  // not yet freed; by id
    std::shared_ptr<const Snapshot> snapshot_;                       // null: to be rebuilt
    struct Removal {
        std::uint64_t generation;
        std::uint64_t id;
        std::uint64_t added;
    };
    std::deque<Removal> removals_;   // newest last
    std::uint64_t oldest_base_ = 1;  // deltas can be made from this generation on
    std::uint64_t generation_ = 1;
    std::uint64_t next_id_ = 1;
};

}  // namespace aioflagcx::engine
