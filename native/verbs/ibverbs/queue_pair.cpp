#include "verbs/ibverbs/queue_pair.h"

#include <arpa/inet.h>
#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

// The highest bit of a work request's number tells receives from sends.
constexpr std::uint64_t kReceive = std::uint64_t{1} << 63;
// Small writes whose bytes travel in the request itself, so that the device need not fetch them;
// NICs offer 60 to 1,000 bytes.
constexpr std::uint32_t kWantedInline = 64;
// Hops of a routed packet (RoCE v2's time to live).
constexpr std::uint8_t kHopLimit = 64;
// Longest chain of work requests given to the device at once.
constexpr std::size_t kChain = 128;

// Where a queue pair begins to number its requests. What a destroyed one has left in a completion
// queue is not mistaken for those of another that got its number.
std::uint64_t next_first_request() noexcept {
    static std::atomic<std::uint64_t> count{0};
    return (count.fetch_add(1, std::memory_order_relaxed) & 0x7fff'ffff) << 32;
}

IbvCompletionQueue& ibv_queue(CompletionQueue* cq) {
    auto* queue = dynamic_cast<IbvCompletionQueue*>(cq);
    if (queue == nullptr) {
        throw NativeError("create_qp", EINVAL, "completion queue is not an RDMA device's");
    }
    return *queue;
}

std::uint32_t random_psn() {
    std::uint32_t psn = 0;
    if (::getrandom(&psn, sizeof psn, 0) != static_cast<ssize_t>(sizeof psn)) {
        throw NativeError("getrandom", errno, "packet sequence number");
    }
    return psn & 0xffffff;
}

ibv_qp* create(ibv_pd* pd, const QpInit& init, std::uint32_t* max_inline) {
    ibv_qp_init_attr attributes{};
    attributes.qp_type = IBV_QPT_RC;
    attributes.send_cq = ibv_queue(init.send_cq).get();
    attributes.recv_cq = ibv_queue(init.recv_cq).get();
    attributes.cap.max_send_wr = std::max(init.max_send_wr, 1U);
    attributes.cap.max_recv_wr = std::max(init.max_recv_wr, 1U);
    attributes.cap.max_send_sge = 1;
    attributes.cap.max_recv_sge = 1;
    attributes.cap.max_inline_data = kWantedInline;
    ibv_qp* qp = Library::get().create_qp(pd, &attributes);
    if (qp == nullptr && errno == EINVAL) {
        attributes.cap.max_inline_data = 0;  // not every device has it
        qp = Library::get().create_qp(pd, &attributes);
    }
    if (qp == nullptr) {
        throw NativeError(
            "ibv_create_qp", errno,
            std::to_string(init.max_send_wr) + " send and " + std::to_string(init.max_recv_wr) +
                " receive requests (max_wr_per_qp)" +
                (errno == ENOMEM ? "; memory to be locked may be limited: ulimit -l" : ""));
    }
    *max_inline = attributes.cap.max_inline_data;
    return qp;
}

ibv_wr_opcode to_ibv(WrOpcode opcode) noexcept {
    return static_cast<ibv_wr_opcode>(static_cast<std::uint8_t>(opcode));
}

WcOpcode completion_opcode(WrOpcode opcode) noexcept {
    switch (opcode) {
        case WrOpcode::RdmaWrite:
        case WrOpcode::RdmaWriteWithImm:
            return WcOpcode::RdmaWrite;
        case WrOpcode::RdmaRead:
            return WcOpcode::RdmaRead;
        case WrOpcode::Send:
            break;
    }
    return WcOpcode::Send;
}

}  // namespace

IbvQueuePair::IbvQueuePair(std::shared_ptr<const Port> port, std::shared_ptr<ibv_pd> pd,
                           const QpInit& init)
    : port_(std::move(port)),
      pd_(std::move(pd)),
      send_cq_(ibv_queue(init.send_cq)),
      recv_cq_(ibv_queue(init.recv_cq)),
      init_(init),
      psn_(random_psn()),
      qp_(create(pd_.get(), init, &max_inline_)),
      num_(qp_->qp_num),
      sends_(std::max(init.max_send_wr, 1U)),
      receives_(std::max(init.max_recv_wr, 1U)),
      chain_(kChain),
      sges_(kChain) {
    send_head_ = send_tail_ = recv_head_ = recv_tail_ = next_first_request();
    to_init();
    send_cq_.add(*this);
    if (&recv_cq_ != &send_cq_) recv_cq_.add(*this);
}

IbvQueuePair::~IbvQueuePair() {
    send_cq_.remove(*this);
    recv_cq_.remove(*this);
    destroy();
}

QpState IbvQueuePair::state() const noexcept {
    const std::lock_guard lock(mutex_);
    return state_;
}

Attributes IbvQueuePair::local_attributes() const {
    Address own = port_->address;
    own.qpn = num();
    own.psn = psn_;
    return to_map(own);
}

void IbvQueuePair::modify(ibv_qp_attr& attributes, int mask, const char* step) {
    const int error = Library::get().modify_qp(qp_.get(), &attributes, mask);
    if (error != 0) throw NativeError("ibv_modify_qp", error, step);
}

void IbvQueuePair::to_init() {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_INIT;
    attributes.pkey_index = 0;
    attributes.port_num = port_->options.port.port;
    attributes.qp_access_flags =
        IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ;
    modify(attributes, IBV_QP_STATE | IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS,
           "to INIT");
    state_ = QpState::Init;
}

void IbvQueuePair::to_rts(const Address& remote) {
    const Address& own = port_->address;
    check_match(own, remote);
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_RTR;
    attributes.path_mtu = static_cast<ibv_mtu>(std::min(own.mtu, remote.mtu));
    attributes.dest_qp_num = remote.qpn;
    attributes.rq_psn = remote.psn;
    attributes.max_dest_rd_atomic = static_cast<std::uint8_t>(port_->max_dest_rd_atomic);
    attributes.min_rnr_timer = init_.min_rnr_timer;
    attributes.ah_attr.dlid = remote.lid;
    attributes.ah_attr.sl = port_->options.service_level;
    attributes.ah_attr.port_num = port_->options.port.port;
    // InfiniBand needs the global header only between subnets; RoCE always has it.
    if (own.kind != GidKind::InfiniBand || !same_subnet(own.gid, remote.gid)) {
        attributes.ah_attr.is_global = 1;
        std::memcpy(attributes.ah_attr.grh.dgid.raw, remote.gid.data(), remote.gid.size());
        attributes.ah_attr.grh.sgid_index = port_->gid_index;
        attributes.ah_attr.grh.hop_limit = kHopLimit;
        attributes.ah_attr.grh.traffic_class = port_->options.traffic_class;
    }
    modify(attributes,
           IBV_QP_STATE | IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER,
           "to RTR");
    attributes = {};
    attributes.qp_state = IBV_QPS_RTS;
    attributes.timeout = port_->options.timeout;
    attributes.retry_cnt = port_->options.retry_cnt;
    attributes.rnr_retry = init_.rnr_retry;
    attributes.sq_psn = psn_;
    attributes.max_rd_atomic =
        static_cast<std::uint8_t>(std::min(port_->max_rd_atomic, remote.rd_atomic));
    modify(attributes,
           IBV_QP_STATE | IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
               IBV_QP_MAX_QP_RD_ATOMIC,
           "to RTS");
}

void IbvQueuePair::accept(const Attributes& remote) {
    connect(remote, Deadline::max());
    const std::lock_guard lock(mutex_);
    is_responder_ = true;
}

// Both sides alike: what the initiator sends before the responder is in RTR is sent again by the
// transport, and the handshake sees to it that it is.
void IbvQueuePair::connect(const Attributes& remote, Deadline) {
    const Address address = from_map(remote);
    const std::lock_guard lock(mutex_);
    if (!qp_ || state_ != QpState::Init) {
        throw NativeError("connect", EINVAL, "the QP is not in INIT");
    }
    to_rts(address);
    state_ = QpState::Rts;
}

// ---- Sends -----------------------------------------------------------------------------------

std::size_t IbvQueuePair::post_send(std::span<const SendWr> requests) {
    const std::lock_guard lock(mutex_);
    if (!qp_ || (state_ != QpState::Rts && state_ != QpState::Err)) {
        throw NativeError("post_send", EINVAL, "the QP is not in RTS");
    }
    std::size_t taken = 0;
    while (taken < requests.size()) {
        const std::size_t depth = sends_.size() - (send_tail_ - send_head_);
        const std::size_t wanted = std::min({requests.size() - taken, depth, kChain});
        const std::size_t room = send_cq_.reserve(static_cast<std::uint32_t>(wanted));
        if (room == 0) break;
        for (std::size_t i = 0; i < room; ++i) {
            const SendWr& request = requests[taken + i];
            sends_[(send_tail_ + i) % sends_.size()] = {
                request.wr_id, completion_opcode(request.opcode), request.signaled};
            sges_[i] = {request.sge.addr, request.sge.length, request.sge.lkey};
            ibv_send_wr& wr = chain_[i];
            wr = {};
            wr.wr_id = send_tail_ + i;
            wr.next = i + 1 < room ? &chain_[i + 1] : nullptr;
            wr.sg_list = &sges_[i];
            wr.num_sge = request.sge.length == 0 ? 0 : 1;
            wr.opcode = to_ibv(request.opcode);
            wr.imm_data = htonl(request.imm);
            wr.wr.rdma.remote_addr = request.remote_addr;
            wr.wr.rdma.rkey = request.rkey;
            if (i + 1 == room) wr.send_flags |= IBV_SEND_SIGNALED;
            if (request.opcode != WrOpcode::RdmaRead && request.sge.length != 0 &&
                request.sge.length <= max_inline_) {
                wr.send_flags |= IBV_SEND_INLINE;
            }
        }
        const std::size_t posted = post_chain(room);
        send_cq_.release(static_cast<std::uint32_t>(room - posted));
        send_tail_ += posted;
        taken += posted;
        if (posted < room) break;
    }
    return taken;
}

// How many of the chain the device took.
std::size_t IbvQueuePair::post_chain(std::size_t count) {
    ibv_send_wr* bad = nullptr;
    const int error = ibv_post_send(qp_.get(), chain_.data(), &bad);
    if (error == 0) return count;
    const std::size_t taken = bad == nullptr ? 0 : static_cast<std::size_t>(bad - chain_.data());
    if (taken == 0 && error == ENOMEM) return 0;  // the device counts otherwise than we do: later
    if (taken == 0) throw NativeError("ibv_post_send", error, "");
    // The signal was on one that was refused, so nothing would tell of those taken but a flush.
    go_to_error();
    return taken;
}

void IbvQueuePair::complete(const ibv_wc& wc, std::deque<WorkCompletion>& out) {
    const std::lock_guard lock(mutex_);
    if (wc.status != IBV_WC_SUCCESS) state_ = QpState::Err;
    if ((wc.wr_id & kReceive) != 0) {
        complete_receive(wc, out);
    } else {
        complete_send(wc, out);
    }
}

void IbvQueuePair::complete_send(const ibv_wc& wc, std::deque<WorkCompletion>& out) {
    if (wc.wr_id < send_head_ || wc.wr_id >= send_tail_) return;
    std::uint32_t completed = 0;
    while (send_head_ <= wc.wr_id) {
        const Posted& posted = sends_[send_head_ % sends_.size()];
        // Those before it have succeeded: an error would have an entry of its own.
        const bool itself = send_head_ == wc.wr_id;
        if ((itself && wc.status != IBV_WC_SUCCESS) || posted.signaled) {
            WorkCompletion completion;
            completion.wr_id = posted.wr_id;
            completion.opcode = posted.opcode;
            completion.qp_num = num();
            if (itself) {
                completion.status = static_cast<WcStatus>(wc.status);
                completion.vendor_err = wc.vendor_err;
            }
            out.push_back(completion);
        }
        ++send_head_;
        ++completed;
    }
    send_cq_.release(completed);
}

// ---- Receives --------------------------------------------------------------------------------

void IbvQueuePair::post_recv(std::span<const RecvWr> requests) {
    const std::lock_guard lock(mutex_);
    if (!qp_) throw NativeError("ibv_post_recv", EINVAL, "the QP has been fenced");
    for (const RecvWr& request : requests) {
        if (recv_tail_ - recv_head_ == receives_.size()) {
            throw NativeError("ibv_post_recv", ENOMEM, "the receive queue is full");
        }
        if (recv_cq_.reserve(1) == 0) {
            throw NativeError("ibv_post_recv", ENOMEM, "the completion queue is full");
        }
        ibv_sge sge{request.sge.addr, request.sge.length, request.sge.lkey};
        ibv_recv_wr wr{};
        wr.wr_id = kReceive | recv_tail_;
        wr.sg_list = &sge;
        wr.num_sge = request.sge.length == 0 ? 0 : 1;
        receives_[recv_tail_ % receives_.size()] = request.wr_id;
        ibv_recv_wr* bad = nullptr;
        const int error = ibv_post_recv(qp_.get(), &wr, &bad);
        if (error != 0) {
            recv_cq_.release(1);
            throw NativeError("ibv_post_recv", error, "");
        }
        ++recv_tail_;
    }
}

void IbvQueuePair::complete_receive(const ibv_wc& wc, std::deque<WorkCompletion>& out) {
    const std::uint64_t number = wc.wr_id & ~kReceive;
    if (number < recv_head_ || number >= recv_tail_) return;
    WorkCompletion completion;
    completion.wr_id = receives_[number % receives_.size()];
    completion.status = static_cast<WcStatus>(wc.status);
    completion.vendor_err = wc.vendor_err;
    completion.qp_num = num();
    if (wc.status == IBV_WC_SUCCESS) {
        completion.opcode =
            wc.opcode == IBV_WC_RECV_RDMA_WITH_IMM ? WcOpcode::RecvRdmaWithImm : WcOpcode::Recv;
        completion.byte_len = wc.byte_len;
        completion.with_imm = (wc.wc_flags & IBV_WC_WITH_IMM) != 0;
        if (completion.with_imm) completion.imm = ntohl(wc.imm_data);
    }
    out.push_back(completion);
    recv_cq_.release(static_cast<std::uint32_t>(number + 1 - recv_head_));
    recv_head_ = number + 1;  // receives complete in order
}

// ---- The end ---------------------------------------------------------------------------------

void IbvQueuePair::to_error() {
    const std::lock_guard lock(mutex_);
    if (!qp_) return;
    // A device that is gone flushes nothing: its owner destroys the queue pair instead.
    if (const int error = go_to_error()) throw NativeError("ibv_modify_qp", error, "to ERR");
}

// A responder is destroyed: in ERR it should answer nothing more, but not every device leaves at
// once what it had begun (Soft-RoCE stores a packet or two after ibv_modify_qp(3) has returned).
// Once ibv_destroy_qp(3) has, nothing of the queue pair is under way.
bool IbvQueuePair::fence(Deadline) {
    if (!responder()) {
        const std::lock_guard lock(mutex_);
        if (qp_) go_to_error();
        return true;
    }
    // Before it goes, no poll finds it any more; what was posted on it ends unreported.
    send_cq_.remove(*this);
    recv_cq_.remove(*this);
    destroy();
    return true;
}

bool IbvQueuePair::responder() const noexcept {
    const std::lock_guard lock(mutex_);
    return is_responder_;
}

// Its completion queues do not know it any more.
void IbvQueuePair::destroy() noexcept {
    std::uint32_t sends = 0;
    std::uint32_t receives = 0;
    {
        const std::lock_guard lock(mutex_);
        if (!qp_) return;
        go_to_error();
        qp_.reset();
        sends = static_cast<std::uint32_t>(send_tail_ - send_head_);
        receives = static_cast<std::uint32_t>(recv_tail_ - recv_head_);
    }
    send_cq_.leave(sends);  // without mutex_, which is taken after theirs
    recv_cq_.leave(receives);
}

// In ERR the device answers nothing that comes for the queue pair, and flushes what was posted.
// That fails, with the errno value returned, only when the device itself is gone, and its access to
// memory with it.
int IbvQueuePair::go_to_error() noexcept {
    ibv_qp_attr attributes{};
    attributes.qp_state = IBV_QPS_ERR;
    state_ = QpState::Err;
    return Library::get().modify_qp(qp_.get(), &attributes, IBV_QP_STATE);
}

}  // namespace aioflagcx::verbs::ibverbs
