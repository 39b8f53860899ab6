#include "engine/responder.h"

#include <sys/random.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <map>
#include <utility>

#include "common/error.h"
#include "engine/limits.h"
#include "engine/transfer_engine.h"

namespace aioflagcx::engine {

namespace {

KeepaliveToken random_token() {
    KeepaliveToken token{};
    if (::getrandom(token.data(), token.size(), 0) != static_cast<ssize_t>(token.size())) {
        throw NativeError("getrandom", errno, "keepalive token");
    }
    return token;
}

std::uint64_t rail_of(const verbs::Attributes& attributes) {
    const auto found = attributes.find("rail");
    const auto* rail =
        found == attributes.end() ? nullptr : std::get_if<std::uint64_t>(&found->second);
    if (rail == nullptr) throw NativeError("accept", EPROTO, "a queue pair names no rail");
    return *rail;
}

}  // namespace

void ReceiveSink::post_receives(std::uint32_t count) {
    std::vector<verbs::RecvWr> receives(count);
    for (verbs::RecvWr& receive : receives) receive.wr_id = wr_id(0);
    qp_->post_recv(receives);
}

void ReceiveSink::on_completion(std::uint32_t, const verbs::WorkCompletion& wc) {
    if (wc.status != verbs::WcStatus::Success) return;  // flushed: the queue pair is done
    try {
        post_receives(1);
    } catch (const NativeError&) {
        return;  // the initiator's next immediate finds no receive, and its queue pair fails
    }
    if (!wc.with_imm) return;
    if (const auto responder = responder_.lock()) responder->on_immediate(wc.imm);
}

Responder::Responder(std::shared_ptr<TransferEngine> engine, std::uint64_t id, std::string peer)
    : engine_(std::move(engine)), id_(id), peer_(std::move(peer)), token_(random_token()) {
    add(engine_->stats().responders);
}

Responder::~Responder() { close(verbs::Deadline::min()); }

std::string Responder::path() {
    const std::lock_guard lock(mutex_);
    return path_;
}

void Responder::expect_keepalive(Liveness::Seconds interval, Liveness::Seconds timeout) {
    engine_->liveness().expect(id_, token_, interval, timeout,
                               [weak = weak_from_this()](const std::string& reason) {
                                   if (const auto self = weak.lock()) self->lost(reason);
                               });
}

// On the liveness thread: fence before anyone is told, even when the event loop is busy.
void Responder::lost(const std::string& reason) {
    fence_if([](const Accepted&) { return true; });
    engine_->ring().push(KeepaliveLost{id_, reason});
}

Responder::Accepted Responder::accept_one(std::uint64_t attempt, std::uint32_t device,
                                          const verbs::Attributes& remote,
                                          verbs::Attributes* local) {
    const std::uint64_t rail = rail_of(remote);
    RdmaContext& context = *engine_->contexts()[device];
    context.check_up();
    Worker& worker = context.next_worker();
    verbs::QpInit init;
    init.send_cq = init.recv_cq = &worker.cq();
    init.max_recv_wr = kReceiveDepth;
    Accepted accepted{attempt, rail, context.pd().create_qp(init),
                      std::make_shared<ReceiveSink>(worker, weak_from_this())};
    accepted.sink->set_queue_pair(accepted.qp);
    worker.add(accepted.sink);
    try {
        accepted.sink->post_receives(kReceiveDepth);  // before the initiator can send anything
        accepted.qp->accept(remote);
        *local = accepted.qp->local_attributes();
        path_ = accepted.qp->path();
    } catch (...) {
        release({accepted});
        throw;
    }
    return accepted;
}

// The one that the initiator asks for, which has seen the list of them.
std::uint32_t Responder::device_of(const verbs::Attributes& remote) const {
    const std::size_t devices = engine_->contexts().size();
    const auto found = remote.find("device");
    if (found == remote.end()) return static_cast<std::uint32_t>(rail_of(remote) % devices);
    const auto* device = std::get_if<std::uint64_t>(&found->second);
    if (device == nullptr || *device >= devices) {
        throw NativeError(
            "accept", EPROTO,
            "a queue pair asks for a device that is none of our " + std::to_string(devices));
    }
    return static_cast<std::uint32_t>(*device);
}

// mutex_ is held.
void Responder::accept_rail(std::uint64_t attempt, std::uint64_t rail, std::uint32_t device,
                            const std::vector<verbs::Attributes>& remote,
                            std::vector<verbs::Attributes>& reply) {
    std::vector<Accepted> fresh;
    std::string refused;
    for (std::size_t i = 0; i < remote.size() && refused.empty(); ++i) {
        if (rail_of(remote[i]) != rail) continue;
        try {
            fresh.push_back(accept_one(attempt, device, remote[i], &reply[i]));
        } catch (const std::exception& error) {
            refused = error.what();
        }
    }
    if (!refused.empty()) release(std::exchange(fresh, {}));
    for (std::size_t i = 0; i < remote.size(); ++i) {
        if (rail_of(remote[i]) != rail) continue;
        if (!refused.empty()) reply[i] = {{"refused", refused}};
        reply[i]["rail"] = rail;
        reply[i]["device"] = std::uint64_t{device};
        reply[i]["name"] = engine_->contexts()[device]->name();
    }
    std::move(fresh.begin(), fresh.end(), std::back_inserter(accepted_));
}

std::vector<verbs::Attributes> Responder::accept(std::uint64_t attempt,
                                                 const std::vector<verbs::Attributes>& remote) {
    std::map<std::uint64_t, std::uint32_t> rails;  // and the device of each
    for (const verbs::Attributes& attributes : remote) {
        const std::uint32_t device = device_of(attributes);
        if (rails.emplace(rail_of(attributes), device).first->second != device) {
            throw NativeError("accept", EPROTO, "a rail asks for several devices");
        }
    }
    if (!rails.empty() && rails.rbegin()->first >= kMaxRails) {
        throw NativeError("accept", EPROTO,
                          "rail " + std::to_string(rails.rbegin()->first) + " asked for, 0 to " +
                              std::to_string(kMaxRails - 1) + " are possible");
    }
    constexpr std::size_t kLimit = kMaxRails * kMaxQpsPerRail;
    if (rails.empty() || remote.size() > kLimit) {
        throw NativeError("accept", EPROTO,
                          std::to_string(remote.size()) + " queue pairs asked for, 1 to " +
                              std::to_string(kLimit) + " are possible");
    }
    fence_if([&](const Accepted& old) { return rails.contains(old.rail); });
    const std::lock_guard lock(mutex_);
    if (closed_) throw NativeError("accept", 0, "connection of " + peer_ + " is closed");
    if (accepted_.size() + remote.size() > kLimit) {
        throw NativeError("accept", EPROTO,
                          std::to_string(accepted_.size()) +
                              " queue pairs are connected, no more than " + std::to_string(kLimit) +
                              " are possible");
    }
    std::vector<verbs::Attributes> reply(remote.size());
    for (const auto& [rail, device] : rails) accept_rail(attempt, rail, device, remote, reply);
    return reply;
}

// mutex_ is held.
void Responder::release(std::vector<Accepted> accepted) {
    for (Accepted& one : accepted) {
        if (!one.qp->fence(verbs::Deadline::min())) {
            unquiet_.push_back({one.attempt, one.rail, one.qp, nullptr});
        }
        // The sink may be posting a receive: it lets go of the queue pair on its own thread.
        one.sink->worker().run([sink = one.sink, &worker = one.sink->worker()] {
            worker.remove(*sink);
            sink->set_queue_pair(nullptr);
        });
    }
}

template <typename Predicate>
void Responder::fence_if(Predicate matches) {
    const std::lock_guard lock(mutex_);
    const auto kept = std::stable_partition(accepted_.begin(), accepted_.end(),
                                            [&](const Accepted& one) { return !matches(one); });
    std::vector<Accepted> fenced(std::make_move_iterator(kept),
                                 std::make_move_iterator(accepted_.end()));
    accepted_.erase(kept, accepted_.end());
    release(std::move(fenced));
}

template <typename Predicate>
bool Responder::wait_quiet(Predicate matches, verbs::Deadline deadline) {
    std::vector<std::shared_ptr<verbs::QueuePair>> waiting;
    {
        const std::lock_guard lock(mutex_);
        for (const Accepted& one : unquiet_) {
            if (matches(one)) waiting.push_back(one.qp);
        }
    }
    const auto stopped = std::partition(waiting.begin(), waiting.end(),
                                        [=](const auto& qp) { return qp->fence(deadline); });
    const bool quiet = stopped == waiting.end();
    waiting.erase(stopped, waiting.end());
    const std::lock_guard lock(mutex_);
    std::erase_if(unquiet_, [&](const Accepted& one) {
        return std::find(waiting.begin(), waiting.end(), one.qp) != waiting.end();
    });
    return quiet;
}

bool Responder::fence(std::uint64_t attempt, std::uint64_t rail, verbs::Deadline deadline) {
    const auto matches = [=](const Accepted& one) {
        return one.attempt == attempt && one.rail == rail;
    };
    fence_if(matches);
    return wait_quiet(matches, deadline);
}

bool Responder::fence_all(verbs::Deadline deadline) {
    const auto all = [](const Accepted&) { return true; };
    fence_if(all);
    return wait_quiet(all, deadline);
}

bool Responder::close(verbs::Deadline deadline) {
    if (engine_->forked()) return true;
    {
        const std::lock_guard lock(mutex_);
        if (!std::exchange(closed_, true)) sub(engine_->stats().responders);
    }
    engine_->liveness().forget(id_);
    return fence_all(deadline);
}

void Responder::abandon() {
    std::vector<Accepted> abandoned;
    const std::lock_guard lock(mutex_);
    abandoned.swap(unquiet_);
}

bool Responder::expect(std::uint32_t imm, std::uint32_t count) {
    const std::lock_guard lock(imm_mutex_);
    std::uint32_t here = 0;
    if (const auto found = arrived_.find(imm); found != arrived_.end()) {
        here = found->second;
        arrived_.erase(found);
        std::erase(arrival_order_, imm);
    }
    if (here >= count) return true;
    expected_[imm] = count - here;
    return false;
}

void Responder::forget(std::uint32_t imm) {
    const std::lock_guard lock(imm_mutex_);
    expected_.erase(imm);
}

void Responder::on_immediate(std::uint32_t imm) {
    const std::lock_guard lock(imm_mutex_);
    if (const auto found = expected_.find(imm); found != expected_.end()) {
        if (--found->second != 0) return;
        expected_.erase(found);
        engine_->ring().push(Immediates{id_, imm});
        return;
    }
    if (arrived_[imm]++ != 0) return;
    arrival_order_.push_back(imm);
    if (arrival_order_.size() > kMaxPendingImmediates) {
        arrived_.erase(arrival_order_.front());
        arrival_order_.pop_front();
    }
}

}  // namespace aioflagcx::engine
