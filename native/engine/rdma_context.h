// One opened device: its protection domain and its pool of workers.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
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

    // Whether its port is down, or the device is gone: nothing gets through until it is back.
    bool down() const noexcept { return down_.load(); }
    void set_down(bool down) noexcept { down_.store(down); }
    void check_up() const;  // NativeError (ENETDOWN)

    // The workers for `count` queue pairs: as far apart as can be, and each in its turn.
    std::vector<Worker*> next_workers(std::uint32_t count);
    Worker& next_worker() { return *next_workers(1).front(); }
    // Queue pairs of an endpoint.
    std::uint32_t qps_per_endpoint() const noexcept;
    // Memory that confirming reads put in what they read; whatever that is, nobody looks at it.
    // Any thread; blocks the first time. Throws NativeError.
    void make_scratch();
    // After make_scratch().
    verbs::Sge scratch() const noexcept;
    void stop();

  private:
    struct Free {
        void operator()(std::byte* memory) const noexcept { std::free(memory); }
    };

    const std::uint32_t qps_per_endpoint_;  // 0: one for each worker
    std::unique_ptr<verbs::Device> device_;
    std::unique_ptr<verbs::ProtectionDomain> pd_;
    std::vector<std::unique_ptr<Worker>> workers_;
    std::atomic<std::uint32_t> turn_{0};
    std::atomic<bool> down_{false};
    std::once_flag scratch_made_;
    // A page of its own: a forked child may be without it.
    std::unique_ptr<std::byte, Free> scratch_;
    std::unique_ptr<verbs::MemoryRegion> scratch_mr_;
};

}  // namespace aioflagcx::engine
