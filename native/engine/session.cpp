#include "engine/session.h"

#include <algorithm>
#include <utility>

#include "common/error.h"
#include "engine/limits.h"
#include "engine/transfer_engine.h"

namespace aioflagcx::engine {

namespace {

std::uint32_t device_of(const verbs::Attributes& attributes, std::uint32_t devices) {
    const auto found = attributes.find("device");
    const auto* value =
        found == attributes.end() ? nullptr : std::get_if<std::uint64_t>(&found->second);
    if (value == nullptr || *value >= devices) {
        throw NativeError("establish", EPROTO, "the reply names no device of the peer's MR table");
    }
    return static_cast<std::uint32_t>(*value);
}

// What the peer calls its device, for errors and logs.
std::string name_of(const verbs::Attributes& attributes, std::uint32_t device) {
    constexpr std::size_t kMaxName = 64;  // as long as ibv_get_device_name(3)'s can be
    const auto found = attributes.find("name");
    const auto* name =
        found == attributes.end() ? nullptr : std::get_if<std::string>(&found->second);
    if (name == nullptr || name->empty() || name->size() > kMaxName) {
        return "device " + std::to_string(device);
    }
    return *name;
}

}  // namespace

Session::Session(std::shared_ptr<TransferEngine> engine, std::uint64_t id, std::string peer)
    : engine_(std::move(engine)),
      id_(id),
      peer_(std::move(peer)),
      queue_(engine_->ring(), engine_->stats(), engine_->options().slice_size,
             engine_->options().retry_count),
      endpoints_(engine_->contexts().size()),
      table_(std::make_shared<const RemoteTable>(TableData{})) {
    for (std::uint32_t device = 0; device < endpoints_.size(); ++device) {
        endpoints_[device].device = device;
    }
    add(engine_->stats().sessions);
}

Session::~Session() { close(); }

std::vector<verbs::Attributes> Session::prepare(std::uint64_t attempt) {
    const EngineOptions& options = engine_->options();
    std::vector<std::size_t> down;
    {
        const std::lock_guard lock(mutex_);
        if (lost_) throw NativeError("prepare", 0, "session to " + peer_ + " is lost");
        for (std::size_t i = 0; i < endpoints_.size(); ++i) {
            if (endpoints_[i].state == Endpoint::State::Down) down.push_back(i);
        }
    }
    std::vector<Prepared> fresh;
    std::vector<verbs::Attributes> attributes;
    for (const std::size_t i : down) {
        RdmaContext& context = *engine_->contexts()[endpoints_[i].device];
        for (Worker* const worker : context.next_workers(context.qps_per_endpoint())) {
            verbs::QpInit init;
            init.send_cq = init.recv_cq = &worker->cq();
            init.max_send_wr = options.max_wr_per_qp;
            init.rnr_retry = options.rnr_retry;
            fresh.push_back({i, worker, context.pd().create_qp(init)});
            verbs::Attributes local = fresh.back().qp->local_attributes();
            local["rail"] = std::uint64_t{i};
            attributes.push_back(std::move(local));
        }
    }
    std::vector<Prepared> old;
    {
        const std::lock_guard lock(mutex_);
        old = std::exchange(prepared_, std::move(fresh));
        prepared_attempt_ = attempt;
    }
    destroy(std::move(old));
    return attributes;
}

std::string Session::establish(std::uint64_t attempt, const std::vector<verbs::Attributes>& remote,
                               verbs::Deadline deadline) {
    std::vector<Prepared> prepared;
    {
        const std::lock_guard lock(mutex_);
        if (lost_) throw NativeError("establish", 0, "session to " + peer_ + " is lost");
        if (attempt != prepared_attempt_) {
            throw NativeError(
                "establish", ESTALE,
                "attempt " + std::to_string(attempt) + " is not the one prepared last");
        }
        prepared.swap(prepared_);
    }
    const EngineOptions& options = engine_->options();
    std::string path;
    std::vector<std::shared_ptr<Lane>> lanes;
    try {
        if (remote.size() != prepared.size() || prepared.empty()) {
            throw NativeError("establish", EPROTO,
                              "the reply has " + std::to_string(remote.size()) +
                                  " queue pairs for " + std::to_string(prepared.size()));
        }
        const std::uint32_t devices = table()->data().devices;
        for (std::size_t i = 0; i < prepared.size(); ++i) {
            const std::uint32_t remote_device = device_of(remote[i], std::max(devices, 1u));
            prepared[i].qp->connect(remote[i], deadline);
            path = prepared[i].qp->path();
            const std::uint32_t local_device = endpoints_[prepared[i].endpoint].device;
            const LaneLimits limits{options.max_wr_per_qp,
                                    options.max_inflight_bytes_per_endpoint /
                                        engine_->contexts()[local_device]->qps_per_endpoint(),
                                    options.post_batch};
            lanes.push_back(std::make_shared<Lane>(*prepared[i].worker, queue_, limits,
                                                   local_device, remote_device, attempt,
                                                   engine_->contexts()[local_device]->name() +
                                                       "->" + name_of(remote[i], remote_device)));
            if (const std::string note = prepared[i].qp->path_note(); !note.empty()) {
                engine_->ring().push(PathNote{id_, lanes.back()->rail(), path, note});
            }
        }
    } catch (...) {
        destroy(std::move(prepared));
        throw;
    }
    std::unique_lock lock(mutex_);
    if (lost_) {
        lock.unlock();
        destroy(std::move(prepared));
        throw NativeError("establish", 0, "session to " + peer_ + " was lost meanwhile");
    }
    for (std::size_t i = 0; i < prepared.size(); ++i) {
        Endpoint& endpoint = endpoints_[prepared[i].endpoint];
        endpoint.state = Endpoint::State::Up;
        endpoint.attempt = attempt;
        endpoint.cause = {};
        endpoint.rail = lanes[i]->rail();
        endpoint.lanes.push_back(lanes[i]);
        lanes[i]->set_queue_pair(std::move(prepared[i].qp));
        lanes[i]->set_hooks({[this](Lane& lane, const auto& wc) { lane_failed(lane, wc); },
                             [this](Lane& lane) { lane_aborted(lane); },
                             [this](Lane& lane) { lane_flushed(lane); }});
        lanes[i]->worker().add(lanes[i]);
    }
    for (const auto& lane : lanes) {
        queue_.attach(lane);
        lane->wake();
    }
    return path;
}

void Session::destroy(std::vector<Prepared> prepared) {
    for (Prepared& one : prepared) {
        // Freed with the command, on its CQ's thread, as verbs.h asks.
        one.worker->run([qp = std::shared_ptr<verbs::QueuePair>(std::move(one.qp))] {});
    }
}

void Session::watch(const std::string& host, std::uint16_t port,
                    const std::vector<std::uint8_t>& token) {
    KeepaliveToken presented{};
    if (token.size() != presented.size()) {
        throw NativeError("watch", EPROTO, "a keepalive token has 16 bytes");
    }
    std::copy(token.begin(), token.end(), presented.begin());
    const std::lock_guard lock(mutex_);
    if (lost_) return;
    EventRing& ring = engine_->ring();  // outlives the liveness thread
    engine_->liveness().watch(
        id_, host, port, presented, engine_->options().keepalive_interval,
        engine_->options().keepalive_timeout,
        [&ring, id = id_](const std::string& reason) { ring.push(KeepaliveLost{id, reason}); });
}

bool Session::update_table(bool full, std::uint64_t base, std::uint64_t generation,
                           std::span<const std::uint8_t> table,
                           std::span<const std::uint8_t> removed) {
    TableData data = decode_table(table);
    if (data.generation != generation) {
        throw std::invalid_argument("MR table: generation differs from its message's");
    }
    const std::vector<std::uint64_t> gone = decode_removed(removed);
    for (;;) {
        const std::shared_ptr<const RemoteTable> before = this->table();
        // Lanes and transfers index keys by device.
        const std::uint32_t devices = before->data().devices;
        if (devices != 0 && data.devices != devices) {
            throw std::invalid_argument("MR table: " + std::to_string(data.devices) +
                                        " devices, there were " + std::to_string(devices));
        }
        if (!full && before->data().generation != base) return false;
        const auto after =
            full ? std::make_shared<const RemoteTable>(data) : before->apply(data, gone);
        const std::lock_guard lock(mutex_);
        if (table_ != before) continue;  // another update came first
        if (after->data().generation >= table_->data().generation) table_ = after;
        return true;
    }
}

std::shared_ptr<const RemoteTable> Session::table() {
    const std::lock_guard lock(mutex_);
    return table_;
}

std::uint64_t Session::generation() { return table()->data().generation; }

std::shared_ptr<TransferTask> Session::submit(Request& request, std::uint64_t id, std::uint32_t imm,
                                              bool now, std::shared_ptr<Waiter> waiter) {
    const std::shared_ptr<const RemoteTable> remote = table();
    std::vector<Piece> pieces = request.resolve(*remote);
    if (now && imm == 0 && request.bytes_total() <= kNowBytes) {
        const std::shared_ptr<Lane> lane = queue_.idle_lane();
        if (lane && lane->try_now(request.op(), pieces, *remote)) {
            queue_.done_now(request.op(), request.bytes_total());
            request.release();
            if (waiter) waiter->open();
            return nullptr;
        }
    }
    auto task = std::make_shared<TransferTask>(id, request.op(), imm, std::move(pieces),
                                               request.take_uses(), remote, request.bytes_total());
    task->waiter = std::move(waiter);
    if (!queue_.submit(task)) {
        request.return_uses(std::move(task->uses));
        throw NativeError("submit", 0, "session to " + peer_ + " is lost");
    }
    return task;
}

void Session::abort(const std::shared_ptr<TransferTask>& task) {
    queue_.cancel(*task);
    std::vector<std::shared_ptr<Lane>> lanes;
    {
        const std::lock_guard lock(mutex_);
        for (const Endpoint& endpoint : endpoints_) {
            lanes.insert(lanes.end(), endpoint.lanes.begin(), endpoint.lanes.end());
        }
    }
    for (const auto& lane : lanes) {
        // Not with a reference to the session: its end waits for this thread.
        lane->worker().run([lane, task] { lane->abort(*task); });
    }
}

Endpoint* Session::endpoint_of(const Lane& lane) {
    for (Endpoint& endpoint : endpoints_) {
        for (const auto& other : endpoint.lanes) {
            if (other.get() == &lane) return &endpoint;
        }
    }
    return nullptr;
}

void Session::lane_aborted(Lane& lane) {
    const std::lock_guard lock(mutex_);
    if (Endpoint* endpoint = endpoint_of(lane)) fail_endpoint(*endpoint);
}

void Session::lane_failed(Lane& lane, const verbs::WorkCompletion& wc) {
    const std::lock_guard lock(mutex_);
    Endpoint* endpoint = endpoint_of(lane);
    if (endpoint == nullptr) return;
    if (endpoint->state == Endpoint::State::Up) {
        endpoint->cause = {wc.status, wc.vendor_err, lane.rail()};
    }
    fail_endpoint(*endpoint);
}

// mutex_ is held.
void Session::fail_endpoint(Endpoint& endpoint) {
    if (endpoint.state != Endpoint::State::Up) return;
    endpoint.state = Endpoint::State::Failing;
    add(engine_->stats().endpoints_failed);
    for (const auto& lane : endpoint.lanes) {
        queue_.detach(*lane);
        lane->worker().run([lane] { lane->kill(); });
    }
}

void Session::lane_flushed(Lane& lane) {
    lane.worker().remove(lane);
    lane.destroy_queue_pair();
    queue_.forget(lane);
    const std::lock_guard lock(mutex_);
    Endpoint* endpoint = endpoint_of(lane);
    if (endpoint == nullptr) return;
    std::erase_if(endpoint->lanes, [&](const auto& other) { return other.get() == &lane; });
    if (!endpoint->lanes.empty()) return;
    endpoint->state = Endpoint::State::Down;
    queue_.attempt_down(endpoint->attempt, endpoint->cause);
    if (!lost_) {
        engine_->ring().push(EndpointDown{id_, endpoint->attempt, endpoint->cause.name(),
                                          endpoint->cause.vendor_err, endpoint->rail});
    }
    flushed_.notify_all();
}

void Session::fail() {
    std::vector<Prepared> prepared;
    {
        const std::lock_guard lock(mutex_);
        if (lost_) return;
        lost_ = true;
        prepared.swap(prepared_);
        queue_.lose();
        for (Endpoint& endpoint : endpoints_) fail_endpoint(endpoint);
    }
    engine_->liveness().forget(id_);
    destroy(std::move(prepared));
}

void Session::close() {
    if (engine_->forked()) return;
    fail();
    std::unique_lock lock(mutex_);
    flushed_.wait(lock, [this] {
        return std::all_of(endpoints_.begin(), endpoints_.end(), [](const Endpoint& endpoint) {
            return endpoint.state == Endpoint::State::Down;
        });
    });
    if (std::exchange(counted_, false)) sub(engine_->stats().sessions);
}

}  // namespace aioflagcx::engine
