#include "verbs/soft/queue_pair.h"

#include <cerrno>
#include <cstring>
#include <tuple>

#include "common/error.h"
#include "verbs/soft/local/connection.h"
#include "verbs/soft/local/initiator.h"
#include "verbs/soft/process_initiator.h"
#include "verbs/soft/registry.h"
#include "verbs/soft/tcp_connect.h"
#include "verbs/soft/tcp_initiator.h"

namespace aioflagcx::verbs::soft {

namespace {

// One count a process: a number names one QP on every completion queue. 24 bits, as on a NIC.
std::uint32_t next_qp_num() noexcept {
    static std::atomic<std::uint32_t> next{1};
    return next.fetch_add(1, std::memory_order_relaxed) & 0xffffffU;
}

SoftCompletionQueue& soft_cq(CompletionQueue* cq) {
    auto* soft = dynamic_cast<SoftCompletionQueue*>(cq);
    if (soft == nullptr) {
        throw NativeError("create_qp", EINVAL, "completion queue is not the soft device's");
    }
    return *soft;
}

}  // namespace

SoftQueuePair::SoftQueuePair(std::shared_ptr<DeviceCore> core, std::shared_ptr<const MrTable> mrs,
                             const QpInit& init)
    : core_(std::move(core)),
      mrs_(std::move(mrs)),
      send_cq_(soft_cq(init.send_cq)),
      recv_cq_(soft_cq(init.recv_cq)),
      init_(init),
      num_(next_qp_num()),
      responder_(
          std::make_shared<Responder>(mrs_, recv_cq_, num_, init.max_recv_wr, init.min_rnr_timer)) {
    if (init.max_send_wr > kMaxQpWr || init.max_recv_wr > kMaxQpWr) {
        throw NativeError("create_qp", EINVAL, "more work requests than max_qp_wr");
    }
    core_->add(*this);
}

SoftQueuePair::~SoftQueuePair() {
    core_->remove(*this);
    // As ibv_destroy_qp(3): what was outstanding or not yet polled vanishes.
    connected_.store(nullptr, std::memory_order_release);
    initiator_.reset();
    fence(Deadline::min());
    recv_cq_.discard(num_);
}

QpState SoftQueuePair::state() const noexcept {
    const Initiator* const initiator = connected_.load(std::memory_order_acquire);
    switch (responder_->gate().state()) {
        case Gate::State::Closed:
            return QpState::Err;
        case Gate::State::Open:
            return QpState::Rts;
        case Gate::State::Idle:
            break;
    }
    if (initiator == nullptr) return QpState::Init;
    return initiator->in_error() ? QpState::Err : QpState::Rts;
}

SoftAttributes SoftQueuePair::own_attributes() const {
    SoftAttributes own;
    own.qpn = num_;
    own.token = responder_->token();
    own.process = process_token();
    own.host = core_->host;
    const auto io = core_->io("query_qp");
    own.port = io->port();
    own.paths = core_->paths;
    own.streams = core_->streams;
    own.machine = core_->machine;
    own.socket = io->local_name();
    return own;
}

Attributes SoftQueuePair::local_attributes() const { return to_map(own_attributes()); }

void SoftQueuePair::take_role(Role role, const char* call) {
    const std::lock_guard lock(setup_mutex_);
    if (role_ != Role::None || responder_->gate().state() != Gate::State::Idle) {
        throw NativeError(call, EINVAL, "the QP is not in INIT");
    }
    role_ = role;
}

void SoftQueuePair::accept(const Attributes& remote) {
    const SoftAttributes initiator = from_map(remote);
    const auto io = core_->io("accept");
    const std::vector<Path> paths = common_paths(initiator, own_attributes());
    take_role(Role::Accepting, "accept");
    const std::lock_guard lock(setup_mutex_);
    responder_->expect(initiator.token, initiator.streams);
    if (!responder_->open()) throw NativeError("accept", ECANCELED, "the QP is in ERR");
    // The initiator takes the first that turns out to be possible.
    path_.store(path_name(paths.front()), std::memory_order_release);
    for (const Path path : paths) {
        if (path == Path::Process) {
            Registry::process().add(responder_);
        } else {
            io->expose(responder_);
        }
    }
    role_ = Role::Responder;
}

void SoftQueuePair::connect(const Attributes& remote, Deadline deadline) {
    const SoftAttributes responder = from_map(remote);
    core_->io("connect");
    take_role(Role::Connecting, "connect");
    Path path = Path::Process;
    std::unique_ptr<Initiator> initiator;
    try {
        std::tie(path, initiator) = reach_any(responder, deadline);
    } catch (...) {
        const std::lock_guard lock(setup_mutex_);
        role_ = Role::None;
        throw;
    }
    const std::lock_guard lock(setup_mutex_);
    if (responder_->gate().state() == Gate::State::Closed) {
        throw NativeError("connect", ECANCELED, "the QP went to ERR meanwhile");
    }
    role_ = Role::Initiator;
    path_.store(path_name(path), std::memory_order_release);
    initiator_ = std::move(initiator);
    connected_.store(initiator_.get(), std::memory_order_release);
}

// By the first path that turns out to be possible.
std::pair<Path, std::unique_ptr<Initiator>> SoftQueuePair::reach_any(
    const SoftAttributes& responder, Deadline deadline) {
    const std::vector<Path> paths = common_paths(own_attributes(), responder);
    for (std::size_t i = 0;; ++i) {
        try {
            return {paths[i], reach(paths[i], responder, deadline)};
        } catch (const local::Unavailable& error) {
            path_note_ = error.what();
            if (i + 1 == paths.size()) {
                throw local::Unavailable(
                    error.call(), error.error(),
                    error.detail() + "; soft_paths leaves no other path, such as 'tcp'");
            }
        }
    }
}

std::unique_ptr<Initiator> SoftQueuePair::reach(Path path, const SoftAttributes& remote,
                                                Deadline deadline) {
    const Initiator::Init init{&send_cq_, num_, init_.max_send_wr, init_.rnr_retry, mrs_};
    if (path == Path::Tcp) {
        return std::make_unique<TcpInitiator>(
            init, open_streams(SocketAddress::numeric(remote.host, remote.port), remote.token,
                               core_->streams, deadline));
    }
    if (path == Path::Local) {
        return std::make_unique<local::LocalInitiator>(
            init, std::make_unique<local::Connection>(remote.socket, remote.token,
                                                      responder_->token(), deadline));
    }
    auto target = Registry::process().find(remote.token);
    if (!target || !target->claim(responder_->token())) {
        throw NativeError("connect", ECONNREFUSED, "the peer's QP does not know this one");
    }
    return std::make_unique<ProcessInitiator>(init, std::move(target));
}

std::size_t SoftQueuePair::post_send(std::span<const SendWr> requests) {
    Initiator* const initiator = connected_.load(std::memory_order_acquire);
    if (initiator != nullptr) return initiator->post(requests);
    if (state() != QpState::Err) throw NativeError("post_send", EINVAL, "no initiator in RTS");
    for (const SendWr& wr : requests) {
        WorkCompletion wc;
        wc.wr_id = wr.wr_id;
        wc.status = WcStatus::WrFlushErr;
        wc.qp_num = num_;
        send_cq_.push({&wc, 1});
    }
    return requests.size();
}

bool SoftQueuePair::try_now(const SendWr& request) {
    Initiator* const initiator = connected_.load(std::memory_order_acquire);
    return initiator != nullptr && initiator->try_now(request);
}

void SoftQueuePair::post_recv(std::span<const RecvWr> requests) {
    // An initiator's ERR flushes its receives too.
    if (state() == QpState::Err) responder_->fail();
    responder_->receives().post(requests);
}

void SoftQueuePair::to_error() { fence(Deadline::min()); }

bool SoftQueuePair::fence(Deadline deadline) {
    {
        const std::lock_guard lock(setup_mutex_);
        responder_->fail();
        if (role_ == Role::Responder) {
            Registry::process().remove(responder_->token());
            if (const auto io = core_->io_or_null()) io->retract(responder_);
        }
    }
    Initiator* const initiator = connected_.load(std::memory_order_acquire);
    if (initiator != nullptr) initiator->to_error();
    const auto guest = responder_->guest();
    return !guest || guest->wait_idle(deadline);
}

}  // namespace aioflagcx::verbs::soft
