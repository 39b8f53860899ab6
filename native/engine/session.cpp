#include "engine/session.h"

#include <algorithm>
#include <cerrno>
#include <iterator>
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

const std::string* text_of(const verbs::Attributes& attributes, const char* key) {
    const auto found = attributes.find(key);
    return found == attributes.end() ? nullptr : std::get_if<std::string>(&found->second);
}

std::string remote_name(std::uint32_t device) { return "device " + std::to_string(device); }

// What the peer calls its device, for errors and logs.
std::string name_of(const verbs::Attributes& attributes, std::uint32_t device) {
    constexpr std::size_t kMaxName = 64;  // as long as ibv_get_device_name(3)'s can be
    const std::string* name = text_of(attributes, "name");
    const auto is_printable = [](unsigned char c) { return c > ' ' && c < 0x7f; };
    if (name == nullptr || name->empty() || name->size() > kMaxName ||
        !std::all_of(name->begin(), name->end(), is_printable)) {
        return remote_name(device);
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
      table_(std::make_shared<const RemoteTable>(TableData{})) {
    std::vector<DevicePair> pairs;
    for (std::uint32_t i = 0; i < std::min<std::size_t>(engine_->contexts().size(), kMaxRails);
         ++i) {
        pairs.push_back({i, std::nullopt});
    }
    set_pairs(std::move(pairs));
    add(engine_->stats().sessions);
}

Session::~Session() { close(); }

// mutex_ is held, or nobody else knows this.
void Session::set_pairs(std::vector<DevicePair> pairs) {
    pairs_ = std::move(pairs);
    endpoints_ = std::vector<Endpoint>(pairs_.size());
    for (std::size_t rail = 0; rail < pairs_.size(); ++rail) {
        endpoints_[rail].local = engine_->contexts()[pairs_[rail].local]->name();
    }
}

void Session::meet(const std::vector<verbs::Attributes>& devices) {
    std::vector<verbs::Network> ours, theirs;
    for (const auto& context : engine_->contexts()) ours.push_back(context->device().network());
    std::vector<std::string> names;
    for (const verbs::Attributes& device : devices) {
        const std::string* kind = text_of(device, "kind");
        const std::string* subnet = text_of(device, "subnet");
        if (kind == nullptr || subnet == nullptr) {
            throw NativeError("meet", EPROTO, "a device of the peer has no kind or no subnet");
        }
        theirs.push_back({*kind, *subnet});
        names.push_back(name_of(device, static_cast<std::uint32_t>(names.size())));
    }
    if (theirs.empty()) throw NativeError("meet", EPROTO, "the peer names no device");
    std::vector<DevicePair> pairs = match_devices(ours, theirs);
    const std::lock_guard lock(mutex_);
    theirs_ = std::move(names);
    set_pairs(std::move(pairs));
}

std::uint32_t Session::rails() {
    const std::lock_guard lock(mutex_);
    return static_cast<std::uint32_t>(pairs_.size());
}

std::string Session::rail_name(std::uint32_t rail) {
    const std::lock_guard lock(mutex_);
    const Endpoint& endpoint = endpoints_.at(rail);
    if (!endpoint.rail.empty()) return endpoint.rail;
    const auto& remote = pairs_[rail].remote;
    return endpoint.local + "->" + (remote ? theirs_[*remote] : remote_name(rail));
}

std::uint32_t Session::local_device(std::uint32_t rail) {
    const std::lock_guard lock(mutex_);
    return pairs_.at(rail).local;
}

// mutex_ is held.
Endpoint& Session::endpoint(std::uint32_t rail, const char* call) {
    if (lost_) throw NativeError(call, 0, "session to " + peer_ + " is lost");
    if (rail >= endpoints_.size()) {
        throw NativeError(call, EINVAL, "there is no rail " + std::to_string(rail));
    }
    return endpoints_[rail];
}

std::vector<verbs::Attributes> Session::prepare(std::uint64_t attempt, std::uint32_t rail) {
    const EngineOptions& options = engine_->options();
    DevicePair pair;
    {
        const std::lock_guard lock(mutex_);
        if (endpoint(rail, "prepare").state != Endpoint::State::Down) {
            throw NativeError("prepare", EISCONN, "rail " + std::to_string(rail) + " is not down");
        }
        pair = pairs_[rail];
    }
    RdmaContext& local = *engine_->contexts()[pair.local];
    local.check_up();
    std::vector<Prepared> fresh;
    std::vector<verbs::Attributes> attributes;
    for (Worker* const worker : local.next_workers(local.qps_per_endpoint())) {
        verbs::QpInit init;
        init.send_cq = init.recv_cq = &worker->cq();
        init.max_send_wr = options.max_wr_per_qp;
        init.rnr_retry = options.rnr_retry;
        fresh.push_back({worker, local.pd().create_qp(init)});
        attributes.push_back(fresh.back().qp->local_attributes());
        attributes.back()["rail"] = std::uint64_t{rail};
        if (pair.remote) attributes.back()["device"] = std::uint64_t{*pair.remote};
    }
    {
        const std::lock_guard lock(mutex_);
        if (!lost_) {
            Endpoint& endpoint = endpoints_[rail];
            endpoint.prepared.swap(fresh);
            endpoint.prepared_attempt = attempt;
        }
    }
    destroy(std::move(fresh));  // of an earlier attempt, or of a session that was lost meanwhile
    return attributes;
}

std::string Session::establish(std::uint64_t attempt, std::uint32_t rail,
                               const std::vector<verbs::Attributes>& remote,
                               verbs::Deadline deadline) {
    std::vector<Prepared> prepared;
    {
        const std::lock_guard lock(mutex_);
        Endpoint& ours = endpoint(rail, "establish");
        if (attempt != ours.prepared_attempt || ours.prepared.empty()) {
            throw NativeError(
                "establish", ESTALE,
                "attempt " + std::to_string(attempt) + " is not the one prepared last");
        }
        prepared.swap(ours.prepared);
    }
    std::vector<std::shared_ptr<Lane>> lanes;
    try {
        lanes = connect_lanes(attempt, rail, prepared, remote, deadline);
    } catch (...) {
        destroy(std::move(prepared));
        throw;
    }
    const std::string path = prepared.front().qp->path();
    std::unique_lock lock(mutex_);
    if (lost_) {
        lock.unlock();
        destroy(std::move(prepared));
        throw NativeError("establish", 0, "session to " + peer_ + " was lost meanwhile");
    }
    Endpoint& endpoint = endpoints_[rail];
    endpoint.state = Endpoint::State::Up;
    endpoint.epoch = {attempt, rail};
    endpoint.cause = {};
    endpoint.lanes = lanes;
    for (std::size_t i = 0; i < lanes.size(); ++i) {
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

// Connects the queue pairs, which stay in `prepared`.
std::vector<std::shared_ptr<Lane>> Session::connect_lanes(
    std::uint64_t attempt, std::uint32_t rail, std::vector<Prepared>& prepared,
    const std::vector<verbs::Attributes>& remote, verbs::Deadline deadline) {
    if (remote.size() != prepared.size()) {
        throw NativeError("establish", EPROTO,
                          "the reply has " + std::to_string(remote.size()) + " queue pairs for " +
                              std::to_string(prepared.size()));
    }
    const EngineOptions& options = engine_->options();
    const LaneLimits limits{options.max_wr_per_qp,
                            options.max_inflight_bytes_per_endpoint / prepared.size(),
                            options.post_batch};
    const std::uint32_t devices = std::max(table()->data().devices, 1u);
    DevicePair pair;
    {
        const std::lock_guard lock(mutex_);
        pair = pairs_[rail];
    }
    std::vector<std::shared_ptr<Lane>> lanes;
    for (std::size_t i = 0; i < prepared.size(); ++i) {
        const std::uint32_t remote_device = device_of(remote[i], devices);
        const std::string name = endpoints_[rail].local + "->" + name_of(remote[i], remote_device);
        {
            const std::lock_guard lock(mutex_);
            endpoints_[rail].rail = name;
        }
        if (const std::string* why = text_of(remote[i], "refused")) {
            throw NativeError("accept", 0, "the peer's device takes no queue pair: " + *why);
        }
        if (pair.remote.value_or(remote_device) != remote_device) {
            throw NativeError("establish", EPROTO,
                              "the peer answered with its device " + name + " for device " +
                                  std::to_string(*pair.remote));
        }
        prepared[i].qp->connect(remote[i], deadline);
        lanes.push_back(std::make_shared<Lane>(
            *engine_->contexts()[pair.local], *prepared[i].worker, queue_, limits, pair.local,
            remote_device, Epoch{attempt, rail}, name, engine_->rail_counters().of(name)));
        // Of a rail's queue pairs the first speaks for all.
        if (const std::string note = prepared[i].qp->path_note(); i == 0 && !note.empty()) {
            engine_->ring().push(PathNote{id_, name, prepared[i].qp->path(), note});
        }
    }
    return lanes;
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
    if (std::any_of(data.records.begin(), data.records.end(), [](const TableRecord& record) {
            return (record.flags & kTableReadAfterWrite) != 0;
        })) {
        for (const auto& context : engine_->contexts()) context->make_scratch();
    }
    for (;;) {
        const std::shared_ptr<const RemoteTable> before = this->table();
        // Lanes and transfers index keys by device.
        std::size_t devices = before->data().devices;
        if (devices == 0) {
            const std::lock_guard lock(mutex_);
            devices = theirs_.size();
        }
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
    Pieces pieces = request.resolve(*remote);
    if (now && imm == 0 && request.bytes_total() <= kNowBytes) {
        const std::shared_ptr<Lane> lane = queue_.idle_lane();
        if (lane && lane->try_now(request.op(), pieces, *remote)) {
            lane->count(request.bytes_total());
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

void Session::device_failed(std::uint32_t device) {
    const std::lock_guard lock(mutex_);
    for (std::uint32_t rail = 0; rail < endpoints_.size(); ++rail) {
        Endpoint& endpoint = endpoints_[rail];
        if (pairs_[rail].local != device) continue;
        if (endpoint.state == Endpoint::State::Up) {
            endpoint.cause = {verbs::WcStatus::FatalErr, 0, endpoint.rail};
        }
        fail_endpoint(endpoint);
    }
}

void Session::queue_pair_failed(std::uint32_t device, std::uint32_t qp_num) {
    const std::lock_guard lock(mutex_);
    for (Endpoint& endpoint : endpoints_) {
        const bool has_it =
            std::any_of(endpoint.lanes.begin(), endpoint.lanes.end(), [=](const auto& lane) {
                return lane->local_device() == device && lane->qp_num() == qp_num;
            });
        if (!has_it || endpoint.state != Endpoint::State::Up) continue;
        endpoint.cause = {verbs::WcStatus::FatalErr, 0, endpoint.rail};
        fail_endpoint(endpoint);
    }
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
    queue_.epoch_down(endpoint->epoch, endpoint->cause);
    if (!lost_) {
        engine_->ring().push(EndpointDown{id_, endpoint->epoch, endpoint->cause.name(),
                                          endpoint->cause.vendor_err, endpoint->rail,
                                          endpoint->cause.transport()});
    }
    flushed_.notify_all();
}

void Session::fail() {
    std::vector<Prepared> prepared;
    {
        const std::lock_guard lock(mutex_);
        if (lost_) return;
        lost_ = true;
        queue_.lose();
        for (Endpoint& endpoint : endpoints_) {
            std::move(endpoint.prepared.begin(), endpoint.prepared.end(),
                      std::back_inserter(prepared));
            endpoint.prepared.clear();
            fail_endpoint(endpoint);
        }
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
