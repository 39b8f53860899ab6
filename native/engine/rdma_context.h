// One opened device: its protection domain and its pool of workers.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "engine/options.h"
#include "engine/stats.h"
#include "engine/worker.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

class RdmaContext {
  public:
    RdmaContext(std::unique_ptr<verbs::Device> device, const EngineOptions& options, Stats& stats);
    ~RdmaContext();

    verbs::Device& device() noexcept { return *device_; }
    verbs::ProtectionDomain& pd() noexcept { return *pd_; }
    const std::string& name() const noexcept { return device_->name(); }

    // The workers for `count` queue pairs: as far apart as can be, and each in its turn.
    std::vector<Worker*> next_workers(std::uint32_t count);
    Worker& next_worker() { return *next_workers(1).front(); }
    // Queue pairs of an endpoint.
    std::uint32_t qps_per_endpoint() const noexcept;
    void stop();

  private:
    const std::uint32_t qps_per_endpoint_;  // 0: one for each worker
    std::unique_ptr<verbs::Device> device_;
    std::unique_ptr<verbs::ProtectionDomain> pd_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<std::uint32_t> turn_{0};
};

}  // namespace aioflagcx::engine
