#include "engine/rdma_context.h"

#include <algorithm>
#include <cerrno>
#include <utility>

#include "common/error.h"

namespace aioflagcx::engine {

RdmaContext::RdmaContext(std::unique_ptr<verbs::Device> device, const EngineOptions& options,
                         Stats& stats)
    : qps_per_endpoint_(options.qps_per_endpoint),
      device_(std::move(device)),
      pd_(device_->alloc_pd()) {
    const std::uint32_t workers = options.workers_per_device != 0 ? options.workers_per_device
                                                                  : device_->attributes().workers;
    for (std::uint32_t i = 0; i < workers; ++i) {
        workers_.push_back(std::make_unique<Worker>(*device_, device_->attributes().max_cqe,
                                                    options.spin, stats, "afx-" + device_->name()));
    }
}

RdmaContext::~RdmaContext() {
    stop();
    workers_.clear();  // their CQs before the device
}

void RdmaContext::check_up() const {
    if (down())
        throw NativeError("device", ENETDOWN,
                          "the port of " + name() + " is down or has no address");
}

std::vector<Worker*> RdmaContext::next_workers(std::uint32_t count) {
    const std::uint32_t first = turn_.fetch_add(count, std::memory_order_relaxed);
    std::vector<Worker*> next;
    for (std::uint32_t i = 0; i < count; ++i) {
        next.push_back(workers_[(first + i) % workers_.size()].get());
    }
    return next;
}

std::uint32_t RdmaContext::qps_per_endpoint() const noexcept {
    return qps_per_endpoint_ != 0 ? qps_per_endpoint_ : static_cast<std::uint32_t>(workers_.size());
}

void RdmaContext::make_scratch() {
    constexpr std::size_t kPage = 4096;
    std::call_once(scratch_made_, [this] {
        scratch_.reset(static_cast<std::byte*>(std::aligned_alloc(kPage, kPage)));
        if (!scratch_) throw NativeError("aligned_alloc", ENOMEM, "one page");
        scratch_mr_ = pd_->register_memory(reinterpret_cast<std::uint64_t>(scratch_.get()), kPage,
                                           verbs::kAccessLocalWrite, {});
    });
}

verbs::Sge RdmaContext::scratch() const noexcept {
    return {reinterpret_cast<std::uint64_t>(scratch_.get()), 1, scratch_mr_->lkey()};
}

void RdmaContext::stop() {
    for (const auto& worker : workers_) worker->stop();
}

}  // namespace aioflagcx::engine
