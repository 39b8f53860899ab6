// How many bytes went by which rail, over all sessions of an engine.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

namespace aioflagcx::engine {

// Lock: mutex_ guards the map; a leaf. The counters are relaxed atomics, which lanes hold.
class RailCounters {
  public:
    using Counter = std::shared_ptr<std::atomic<std::uint64_t>>;

    // By "local->remote" device names. Peers choose half of a name, so those beyond kMaxRailNames
    // share one counter.
    Counter of(const std::string& rail);
    std::map<std::string, std::uint64_t> snapshot();

  private:
    std::mutex mutex_;
    std::map<std::string, Counter> counters_;
};

}  // namespace aioflagcx::engine
