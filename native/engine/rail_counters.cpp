#include "engine/rail_counters.h"

#include "engine/limits.h"

namespace aioflagcx::engine {

RailCounters::Counter RailCounters::of(const std::string& rail) {
    const std::lock_guard lock(mutex_);
    const bool known = counters_.size() < kMaxRailNames || counters_.contains(rail);
    Counter& counter = counters_[known ? rail : "others"];
    if (!counter) counter = std::make_shared<std::atomic<std::uint64_t>>(0);
    return counter;
}

std::map<std::string, std::uint64_t> RailCounters::snapshot() {
    const std::lock_guard lock(mutex_);
    std::map<std::string, std::uint64_t> all;
    for (const auto& [rail, counter] : counters_) {
        all.emplace(rail, counter->load(std::memory_order_relaxed));
    }
    return all;
}

}  // namespace aioflagcx::engine
