#include "verbs/soft/memory.h"

#include <cerrno>
#include <mutex>
#include <utility>

#include "common/error.h"
#include "verbs/soft/mapped.h"
#include "verbs/soft/token.h"

namespace aioflagcx::verbs::soft {

using local::kKeySpread;
using local::slot_of;

namespace {

class SoftMemoryRegion final : public MemoryRegion {
  public:
    SoftMemoryRegion(std::shared_ptr<MrTable> table, MrRef entry) noexcept
        : table_(std::move(table)), entry_(std::move(entry)) {}
    ~SoftMemoryRegion() override {
        const bool quiet = revoke(Deadline::min());
        table_->remove(entry_, quiet);
    }

    std::uint32_t lkey() const noexcept override { return entry_->key; }
    std::uint32_t rkey() const noexcept override { return entry_->key; }
    bool revoke(Deadline deadline) override {
        table_->close(entry_);
        return table_->wait_unused(entry_, deadline);
    }

  private:
    std::shared_ptr<MrTable> table_;
    MrRef entry_;
};

}  // namespace

MrTable::MrTable(bool shared) : shared_(shared ? std::make_shared<local::SharedTable>() : nullptr) {
    random_bytes(&next_, sizeof next_);
    if (shared_) taken_.resize(kLocalRegions);
}

MrTable::~MrTable() {
    if (shared_) shared_->shut();
}

MrRef MrTable::add(std::uint64_t addr, std::uint64_t length, std::uint32_t access,
                   const SharedMemory& shared) {
    auto entry = std::make_shared<MrEntry>(addr, length, access, shared);
    const std::lock_guard lock(mutex_);
    if (entries_.size() >= kLocalRegions / 2) {
        throw NativeError("register_memory", ENOMEM,
                          std::to_string(entries_.size()) + " regions are registered");
    }
    std::uint32_t key = 0;
    do {
        key = next_++ * kKeySpread;
    } while (key == 0 || entries_.contains(key) || (shared_ && taken_[slot_of(key)]));
    entry->key = key;
    entries_.emplace(key, entry);
    if (shared_) {
        taken_[slot_of(key)] = true;
        shared_->publish(key, addr, length, access, shared.fd >= 0);
    }
    return entry;
}

void MrTable::close(const MrRef& entry) {
    entry->gate.close();
    if (shared_) shared_->withdraw(entry->key);
}

bool MrTable::wait_unused(const MrRef& entry, Deadline deadline) {
    return !shared_ || shared_->wait_unused(entry->key, deadline);
}

void MrTable::remove(const MrRef& entry, bool quiet) {
    const std::lock_guard lock(mutex_);
    entries_.erase(entry->key);
    if (shared_ && quiet) taken_[slot_of(entry->key)] = false;
}

MrRef MrTable::find(std::uint32_t key) const {
    const std::shared_lock lock(mutex_);
    const auto found = entries_.find(key);
    return found == entries_.end() ? nullptr : found->second;
}

const MrRef& MrCache::find(std::uint32_t key) {
    MrRef& slot = slots_[slot_of(key) % kMrCacheSlots];
    if (!slot || slot->key != key || slot->gate.state() != Gate::State::Open) {
        slot = table_->find(key);
    }
    return slot;
}

PinSet::~PinSet() {
    for (std::size_t i = 0; i < count_; ++i) pinned_[i]->gate.leave();
}

bool PinSet::add(const MrRef& entry) noexcept {
    if (count_ > 0 && pinned_[count_ - 1] == entry) return true;
    if (!entry->gate.enter()) return false;
    pinned_[count_++] = entry;
    return true;
}

WcStatus check_local(MrCache& cache, const SendWr& wr) {
    std::uint32_t needed = 0;
    switch (wr.opcode) {
        case WrOpcode::RdmaWrite:
        case WrOpcode::RdmaWriteWithImm:
        case WrOpcode::Send:
            break;
        case WrOpcode::RdmaRead:
            needed = kAccessLocalWrite;
            break;
        default:
            return WcStatus::LocQpOpErr;
    }
    if (wr.sge.length == 0) return WcStatus::Success;
    if (wr.sge.length > kMaxMessage) return WcStatus::LocLenErr;
    const MrRef& entry = cache.find(wr.sge.lkey);
    const bool granted = entry && entry->grants(wr.sge.addr, wr.sge.length, needed);
    return granted ? WcStatus::Success : WcStatus::LocProtErr;
}

std::unique_ptr<MemoryRegion> make_memory_region(std::shared_ptr<MrTable> table, std::uint64_t addr,
                                                 std::uint64_t length, std::uint32_t access,
                                                 const SharedMemory& shared) {
    constexpr std::uint32_t kKnown = kAccessLocalWrite | kAccessRemoteWrite | kAccessRemoteRead;
    if (length == 0 || length > kMaxMrSize || addr + length - 1 < addr) {
        throw NativeError("register_memory", EINVAL, "range is empty or leaves the address space");
    }
    // As ibv_reg_mr(3): what peers may write, the owner must be allowed to write.
    if ((access & ~kKnown) != 0 ||
        ((access & kAccessRemoteWrite) != 0 && (access & kAccessLocalWrite) == 0)) {
        throw NativeError("register_memory", EINVAL, "access flags");
    }
    require_mapped(addr, length, (access & kAccessLocalWrite) != 0);
    MrRef entry = table->add(addr, length, access, shared);
    return std::make_unique<SoftMemoryRegion>(std::move(table), std::move(entry));
}

}  // namespace aioflagcx::verbs::soft
