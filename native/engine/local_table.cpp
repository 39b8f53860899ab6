#include "engine/local_table.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "common/error.h"
#include "common/thread.h"
#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

// A stopped peer will copy to an address once it goes on, so nothing else may come to lie there:
// the mapping stays until this process ends.
void strand(std::shared_ptr<Allocation> allocation) {
    static std::mutex mutex;
    static auto* const stranded =
        std::make_unique<std::vector<std::shared_ptr<Allocation>>>().release();
    if (!allocation) return;
    const std::lock_guard lock(mutex);
    stranded->push_back(std::move(allocation));
}

}  // namespace

LocalTable::LocalTable(std::vector<verbs::ProtectionDomain*> domains, std::uint64_t max_mr_size)
    : domains_(std::move(domains)), max_mr_size_(max_mr_size) {}

// Everything but its MRs.
std::shared_ptr<LocalRegion> LocalTable::prepare(const RegionSpec& spec) const {
    if (spec.size == 0 || spec.addr + (spec.size - 1) < spec.addr) {
        throw NativeError("register", 0,
                          "bad range: address " + std::to_string(spec.addr) + ", size " +
                              std::to_string(spec.size));
    }
    if (spec.name && spec.name->size() > UINT16_MAX) {
        throw NativeError("register", 0, "a region's name is over 65,535 bytes");
    }
    auto region = std::make_shared<LocalRegion>();
    region->spec = spec;
    region->chunk_size = std::min(spec.size, max_mr_size_);
    region->allocation = Allocation::holding(spec.addr, spec.size);
    return region;
}

std::vector<std::unique_ptr<verbs::MemoryRegion>> LocalTable::register_on(
    verbs::ProtectionDomain& domain, const LocalRegion& region) {
    const RegionSpec& spec = region.spec;
    std::uint32_t access = 0;
    if (spec.local_writable) access |= verbs::kAccessLocalWrite;
    if (spec.access & kTableAccessRead) access |= verbs::kAccessRemoteRead;
    if (spec.access & kTableAccessWrite) access |= verbs::kAccessRemoteWrite;
    verbs::SharedMemory shared;
    std::uint64_t base = 0;  // the range's place in the file
    if (region.allocation) {
        shared.fd = region.allocation->fd();
        base = spec.addr - region.allocation->addr();
    }
    std::vector<std::unique_ptr<verbs::MemoryRegion>> mrs;
    for (std::uint64_t offset = 0; offset < spec.size; offset += region.chunk_size) {
        const std::uint64_t length = std::min(region.chunk_size, spec.size - offset);
        if (region.allocation) shared.offset = base + offset;
        mrs.push_back(domain.register_memory(spec.addr + offset, length, access, shared));
    }
    return mrs;
}

// The devices do it side by side where it takes them long: they fetch and pin every page.
void LocalTable::register_all(const std::vector<std::shared_ptr<LocalRegion>>& regions) const {
    using Mrs = std::vector<std::unique_ptr<verbs::MemoryRegion>>;
    std::vector<std::vector<Mrs>> made(domains_.size());
    std::vector<std::exception_ptr> failures(domains_.size());
    const auto work = [&](std::size_t device) {
        try {
            for (const auto& region : regions) {
                made[device].push_back(register_on(*domains_[device], *region));
            }
        } catch (...) {
            failures[device] = std::current_exception();
        }
    };
    std::uint64_t bytes = 0;
    for (const auto& region : regions) bytes += region->spec.size;
    std::vector<std::thread> threads;
    for (std::size_t device = 1; device < domains_.size(); ++device) {
        try {
            if (bytes >= kParallelRegistration) {
                threads.push_back(start_thread("afx-register", [&work, device] { work(device); }));
                continue;
            }
        } catch (const NativeError&) {  // there is no thread to be had
        }
        work(device);
    }
    if (!domains_.empty()) work(0);
    for (std::thread& thread : threads) thread.join();
    for (const std::exception_ptr& failure : failures) {
        if (failure) std::rethrow_exception(failure);
    }
    for (std::vector<Mrs>& device : made) {
        for (std::size_t i = 0; i < regions.size(); ++i) {
            LocalRegion& region = *regions[i];
            for (auto& mr : device[i]) {
                region.read_after_write |= mr->read_after_write();
                region.mrs.push_back(std::move(mr));
            }
        }
    }
}

std::vector<std::uint64_t> LocalTable::add(std::span<const RegionSpec> specs) {
    std::vector<std::shared_ptr<LocalRegion>> built;
    built.reserve(specs.size());
    for (const RegionSpec& spec : specs) built.push_back(prepare(spec));
    register_all(built);
    std::vector<std::uint64_t> ids;
    ids.reserve(built.size());
    const std::lock_guard lock(mutex_);
    if (!built.empty()) ++generation_;
    for (auto& region : built) {
        region->id = next_id_++;
        region->added = generation_;
        ids.push_back(region->id);
        live_.emplace(region->id, std::move(region));
    }
    snapshot_.reset();
    return ids;
}

void LocalTable::revoke(std::span<const std::uint64_t> ids) {
    const std::lock_guard lock(mutex_);
    bool changed = false;
    for (const std::uint64_t id : ids) {
        const auto found = live_.find(id);
        if (found == live_.end()) continue;
        if (!changed) {
            ++generation_;
            changed = true;
        }
        found->second->revoked.store(true);
        removals_.push_back({generation_, id, found->second->added});
        revoked_.insert(live_.extract(found));
    }
    while (removals_.size() > kTableLogLength) {
        oldest_base_ = removals_.front().generation;
        removals_.pop_front();
    }
    if (changed) snapshot_.reset();
}

bool LocalTable::remove(std::span<const std::uint64_t> ids, verbs::Deadline deadline) {
    revoke(ids);
    bool all = true;
    std::unique_lock lock(mutex_);
    for (const std::uint64_t id : ids) {
        const auto found = revoked_.find(id);
        if (found == revoked_.end()) continue;
        const std::shared_ptr<LocalRegion> region = found->second;
        const auto ready = [&] {
            return !revoked_.contains(id) || (region->users.load() == 0 && !region->freeing);
        };
        if (deadline == verbs::Deadline::max()) {
            unused_.wait(lock, ready);
        } else if (!unused_.wait_until(lock, deadline, ready)) {
            all = false;
            continue;
        }
        if (revoked_.contains(id) && !free_region(lock, *region, deadline)) all = false;
    }
    return all;
}

std::vector<std::uint64_t> LocalTable::close(verbs::Deadline deadline) {
    revoke(ids());
    std::vector<std::uint64_t> in_use;
    std::unique_lock lock(mutex_);
    while (!revoked_.empty()) {
        const std::shared_ptr<LocalRegion> region = revoked_.begin()->second;
        if (region->freeing) {
            unused_.wait(lock);
        } else if (!free_region(lock, *region, deadline)) {
            in_use.push_back(region->id);
            revoked_.erase(region->id);
            strand(std::move(region->allocation));
        }
    }
    return in_use;
}

// False at the deadline: a peer is still inside.
bool LocalTable::free_region(std::unique_lock<std::mutex>& lock, LocalRegion& region,
                             verbs::Deadline deadline) {
    region.freeing = true;
    lock.unlock();
    bool quiet = true;
    for (const auto& mr : region.mrs) quiet &= mr->revoke(deadline);
    if (quiet) {
        region.mrs.clear();
        region.allocation.reset();
    }
    lock.lock();
    region.freeing = false;
    if (quiet) revoked_.erase(region.id);
    unused_.notify_all();
    return quiet;
}

std::shared_ptr<const LocalTable::Snapshot> LocalTable::snapshot() {
    const std::lock_guard lock(mutex_);
    if (!snapshot_) {
        auto fresh = std::make_shared<Snapshot>();
        std::vector<AddressRange> ranges;
        ranges.reserve(live_.size());
        fresh->regions.reserve(live_.size());
        for (const auto& [id, region] : live_) {
            const std::uint32_t writable = region->spec.local_writable ? kLocalWritable : 0;
            ranges.push_back(
                {region->spec.addr, region->spec.size, region->spec.access | writable});
            fresh->regions.push_back(region);
        }
        fresh->index = AddressIndex(std::move(ranges));
        snapshot_ = std::move(fresh);
    }
    return snapshot_;
}

bool LocalTable::acquire(LocalRegion& region) noexcept {
    region.users.fetch_add(1);
    return !region.revoked.load();
}

void LocalTable::release(LocalRegion& region) noexcept {
    if (region.users.fetch_sub(1) == 1 && region.revoked.load()) {
        // Taking the lock orders this after a waiter's check of `users`, so no wake-up is lost.
        const std::lock_guard lock(mutex_);
        unused_.notify_all();
    }
}

void LocalTable::append_record(TableData& data, const LocalRegion& region) const {
    TableRecord record;
    record.id = region.id;
    record.addr = region.spec.addr;
    record.size = region.spec.size;
    record.chunk_size = region.chunk_size;
    record.access = region.spec.access;
    record.key_off = static_cast<std::uint32_t>(data.keys.size());
    if (region.read_after_write) record.flags |= kTableReadAfterWrite;
    if (region.spec.name) record.name_off = data.add_name(*region.spec.name);
    for (const auto& mr : region.mrs) data.keys.push_back(mr->rkey());
    data.records.push_back(record);
}

LocalTable::Changes LocalTable::since(std::uint64_t generation) {
    const std::lock_guard lock(mutex_);
    Changes changes;
    changes.full = generation < oldest_base_ || generation > generation_;
    changes.base = changes.full ? 0 : generation;
    changes.generation = generation_;
    TableData data;
    data.devices = static_cast<std::uint32_t>(domains_.size());
    data.generation = generation_;
    for (auto it = live_.rbegin(); it != live_.rend(); ++it) {  // ids grow with generations
        if (!changes.full && it->second->added <= generation) break;
        append_record(data, *it->second);
    }
    changes.table = encode_table(data);
    if (changes.full) return changes;
    for (auto it = removals_.rbegin(); it != removals_.rend() && it->generation > generation;
         ++it) {
        if (it->added > generation) continue;  // the peer has never heard of it
        changes.removed.append(reinterpret_cast<const char*>(&it->id), sizeof it->id);
    }
    return changes;
}

std::uint64_t LocalTable::generation() {
    const std::lock_guard lock(mutex_);
    return generation_;
}

std::size_t LocalTable::size() {
    const std::lock_guard lock(mutex_);
    return live_.size();
}

std::optional<TableRecord> LocalTable::find(std::uint64_t id, std::string* name) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end()) return std::nullopt;
    const LocalRegion& region = *found->second;
    TableRecord record;
    record.id = id;
    record.addr = region.spec.addr;
    record.size = region.spec.size;
    record.chunk_size = region.chunk_size;
    record.access = region.spec.access;
    if (region.spec.name) {
        record.name_off = 0;
        *name = *region.spec.name;
    }
    return record;
}

std::optional<std::uint32_t> LocalTable::rkey(std::uint64_t id, std::uint64_t addr) {
    const std::lock_guard lock(mutex_);
    const auto found = live_.find(id);
    if (found == live_.end()) return std::nullopt;
    const LocalRegion& region = *found->second;
    if (addr < region.spec.addr || addr - region.spec.addr >= region.spec.size) {
        return std::nullopt;
    }
    return region.mr(0, addr).rkey();
}

std::vector<std::uint64_t> LocalTable::ids() {
    const std::lock_guard lock(mutex_);
    std::vector<std::uint64_t> all;
    for (const auto& [id, region] : live_) all.push_back(id);
    for (const auto& [id, region] : revoked_) all.push_back(id);
    return all;
}

}  // namespace aioflagcx::engine
