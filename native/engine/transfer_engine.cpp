#include "engine/transfer_engine.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "common/own_process.h"
#include "engine/limits.h"
#include "engine/responder.h"
#include "engine/session.h"

namespace aioflagcx::engine {

namespace {

// What is asked for, as far as every device goes along.
EngineOptions within_limits(EngineOptions options,
                            const std::vector<std::unique_ptr<verbs::Device>>& devices) {
    for (const auto& device : devices) {
        const verbs::DeviceAttributes& limits = device->attributes();
        options.slice_size = std::min(options.slice_size, limits.max_msg_size);
        options.max_wr_per_qp = std::min(options.max_wr_per_qp, limits.max_qp_wr);
    }
    return options;
}

std::vector<std::unique_ptr<RdmaContext>> make_contexts(
    std::vector<std::unique_ptr<verbs::Device>> devices, const EngineOptions& options,
    Stats& stats) {
    std::vector<std::unique_ptr<RdmaContext>> contexts;
    for (auto& device : devices) {
        contexts.push_back(std::make_unique<RdmaContext>(std::move(device), options, stats));
    }
    return contexts;
}

std::shared_ptr<LocalTable> make_table(const std::vector<std::unique_ptr<RdmaContext>>& contexts) {
    std::vector<verbs::ProtectionDomain*> domains;
    std::uint64_t max_mr_size = UINT64_MAX;
    for (const auto& context : contexts) {
        domains.push_back(&context->pd());
        max_mr_size = std::min(max_mr_size, context->device().attributes().max_mr_size);
    }
    return std::make_shared<LocalTable>(std::move(domains), max_mr_size);
}

template <typename T>
void remember(std::vector<std::weak_ptr<T>>& registry, const std::shared_ptr<T>& item) {
    std::erase_if(registry, [](const auto& weak) { return weak.expired(); });
    registry.push_back(item);
}

}  // namespace

TransferEngine::TransferEngine(EngineOptions options,
                               std::vector<std::unique_ptr<verbs::Device>> devices)
    : options_(within_limits(std::move(options), devices)),
      contexts_(make_contexts(std::move(devices), options_, stats_)),
      regions_(make_table(contexts_)),
      liveness_(std::make_unique<Liveness>(options_.bind_address, stats_)) {
    watch_devices();
}

std::shared_ptr<TransferEngine> TransferEngine::open(
    EngineOptions options, std::vector<std::unique_ptr<verbs::Device>> devices) {
    return {new TransferEngine(std::move(options), std::move(devices)),
            DeleteInOwnProcess<TransferEngine>()};
}

TransferEngine::~TransferEngine() { close(); }

void TransferEngine::watch_devices() {
    for (std::uint32_t i = 0; i < contexts_.size(); ++i) {
        contexts_[i]->device().on_event(
            [this, i](const verbs::DeviceEvent& event) { on_device_event(i, event); });
    }
}

// On a thread of the device.
void TransferEngine::on_device_event(std::uint32_t device, const verbs::DeviceEvent& event) {
    using Kind = verbs::DeviceEvent::Kind;
    // Without waiting for the retries of every queue pair: slices go to other rails at once.
    const bool queue_pair = event.kind == Kind::QpFatal;
    const bool bad = event.kind == Kind::PortDown || event.kind == Kind::DeviceFatal ||
                     event.kind == Kind::AddressChange || queue_pair;
    const bool back = event.kind == Kind::PortActive || event.kind == Kind::AddressChange;
    if (event.kind == Kind::PortDown || event.kind == Kind::DeviceFatal) {
        contexts_[device]->set_down(true);
    } else if (event.kind == Kind::PortActive) {
        contexts_[device]->set_down(false);
    }
    ring_.push(DeviceNote{device, contexts_[device]->name(), event.text, bad, back});
    if (!bad) return;
    std::vector<std::shared_ptr<Session>> sessions;
    {
        const std::lock_guard lock(mutex_);
        for (const auto& weak : sessions_) {
            if (auto session = weak.lock()) sessions.push_back(std::move(session));
        }
    }
    for (const auto& session : sessions) {
        if (queue_pair) {
            session->queue_pair_failed(device, event.qp_num);
        } else {
            session->device_failed(device);
        }
    }
}

void TransferEngine::check_open() const {
    if (closed()) throw NativeError("engine", 0, "the engine is closed");
}

std::shared_ptr<Session> TransferEngine::create_session(const std::string& peer) {
    const std::shared_ptr<Session> session(
        new Session(shared_from_this(), next_id_.fetch_add(1), peer),
        DeleteInOwnProcess<Session>());
    const std::lock_guard lock(mutex_);
    check_open();
    remember(sessions_, session);
    return session;
}

std::shared_ptr<Responder> TransferEngine::create_responder(const std::string& peer,
                                                            Liveness::Seconds keepalive_interval,
                                                            Liveness::Seconds keepalive_timeout) {
    const std::shared_ptr<Responder> responder(
        new Responder(shared_from_this(), next_id_.fetch_add(1), peer),
        DeleteInOwnProcess<Responder>());
    responder->expect_keepalive(keepalive_interval, keepalive_timeout);
    const std::lock_guard lock(mutex_);
    check_open();
    remember(responders_, responder);
    return responder;
}

std::vector<std::uint64_t> TransferEngine::close() {
    if (forked()) return {};
    std::vector<std::weak_ptr<Session>> sessions;
    std::vector<std::weak_ptr<Responder>> responders;
    {
        const std::lock_guard lock(mutex_);
        if (closed_.exchange(true)) return {};
        sessions.swap(sessions_);
        responders.swap(responders_);
    }
    for (const auto& weak : sessions) {
        if (const auto session = weak.lock()) session->close();
    }
    for (const auto& weak : responders) {
        if (const auto responder = weak.lock()) responder->close(verbs::Deadline::min());
    }
    liveness_->stop();
    auto in_use = regions_->close(verbs::Clock::now() + kClosePatience);
    for (const auto& weak : responders) {
        if (const auto responder = weak.lock()) responder->abandon();
    }
    for (const auto& context : contexts_) {
        context->device().on_event(nullptr);
        context->stop();
    }
    contexts_.clear();  // sockets and device threads end here, not when Python lets go of us
    return in_use;
}

}  // namespace aioflagcx::engine
