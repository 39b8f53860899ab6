// What the engine uses of verbs: one interface, two providers behind it (ibverbs/, soft/).
// The engine never learns which one it drives.
//
// Threads. A CompletionQueue is polled, armed and slept on by one thread, its worker. After
// connect() a QueuePair's post_send() and to_error(), and its destruction when it is an
// initiator, happen on the worker of its send CQ only; post_recv() on the worker of its recv CQ.
// try_now(), fence(), Device, ProtectionDomain and MemoryRegion calls may come from any thread.
// Failures of calls throw NativeError; failures of requests are completions.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "verbs/types.h"

namespace aioflagcx::verbs {

using Clock = std::chrono::steady_clock;
using Deadline = Clock::time_point;

struct DeviceAttributes {
    std::uint32_t max_qp_wr = 0;     // send (and receive) requests a QP may hold
    std::uint32_t max_cqe = 0;       // completions a CQ may hold
    std::uint32_t max_inline = 0;    // bytes
    std::uint64_t max_mr_size = 0;   // bytes; longer regions take several MRs
    std::uint32_t max_msg_size = 0;  // bytes of one request
    std::uint32_t workers = 1;       // threads that keep it busy
};

// What backs a range that peers on the same host may map: its bytes are those of `fd` from `offset`
// on. The file is never shrunk, and the descriptor stays open as long as the MR. -1: no such file.
struct SharedMemory {
    int fd = -1;
    std::uint64_t offset = 0;
};

// A registered range.
class MemoryRegion {
  public:
    virtual ~MemoryRegion() = default;  // as revoke(), without waiting for other processes
    virtual std::uint32_t lkey() const noexcept = 0;
    virtual std::uint32_t rkey() const noexcept = 0;

    // Takes its keys back. True when no peer and no local request of the provider can touch the
    // range any more; false when the deadline comes before that, since a peer on this host is
    // stopped in the middle of a copy: call again to wait on. Idempotent.
    virtual bool revoke(Deadline deadline) = 0;

    // Whether what a peer has written here, and was told has arrived, may be on its way still until
    // the same queue pair reads here: so of device memory, and with relaxed ordering.
    virtual bool read_after_write() const noexcept { return false; }
};

class CompletionQueue {
  public:
    virtual ~CompletionQueue() = default;

    // Takes up to out.size() completions; also drives the provider's progress where it needs any.
    // Completions of one QP come in posting order. Never blocks.
    virtual std::size_t poll(std::span<WorkCompletion> out) = 0;

    // To sleep: arm(), poll() once more (a completion may have come before arm), then wait for
    // fd() to be readable, then disarm(), then poll().
    virtual void arm() = 0;
    virtual void disarm() = 0;
    virtual int fd() const noexcept = 0;

    // When poll() must be called again even if fd() stays silent (retry timers); max() for never.
    virtual Deadline next_deadline() const noexcept { return Deadline::max(); }
};

struct QpInit {
    CompletionQueue* send_cq = nullptr;
    CompletionQueue* recv_cq = nullptr;
    std::uint32_t max_send_wr = 0;
    std::uint32_t max_recv_wr = 0;
    std::uint8_t retry_cnt =
        7;  // as ibv_qp_attr; the soft device's transport is TCP, which retries
    std::uint8_t rnr_retry = 7;       // 7: no limit
    std::uint8_t min_rnr_timer = 12;  // InfiniBand's encoding; 12 is 0.64 ms
};

class QueuePair {
  public:
    virtual ~QueuePair() = default;  // no completion of it is polled any more

    virtual std::uint32_t num() const noexcept = 0;
    virtual QpState state() const noexcept = 0;

    // What the peer needs. An initiator's are complete in INIT; a responder's after accept(),
    // since its choice of path is among them.
    virtual Attributes local_attributes() const = 0;

    // INIT -> RTS towards `remote`. accept() is the responder's side and comes first, connect()
    // the initiator's; connect() returns when the peer's QP takes requests, or throws NativeError
    // (ETIMEDOUT at the deadline, ECONNREFUSED when the peer's QP does not know us).
    virtual void accept(const Attributes& remote) = 0;
    virtual void connect(const Attributes& remote, Deadline deadline) = 0;

    // "process", "local", "tcp" or "ibverbs"; an initiator's is known after connect().
    virtual const char* path() const noexcept = 0;
    // After connect(): why the path is not a better one that both sides would like; or empty.
    virtual std::string path_note() const { return {}; }

    // Queues requests in order and returns how many were taken: fewer when the send queue is
    // full. In ERR what is taken completes with WR_FLUSH_ERR.
    virtual std::size_t post_send(std::span<const SendWr> requests) = 0;
    virtual void post_recv(std::span<const RecvWr> requests) = 0;

    // Carries a write or read without immediate out on the calling thread, where that takes no
    // waiting: a copy to or from a process of this host while nothing else is outstanding. True
    // when it is done, with no completion to follow; otherwise it is to be posted. From any thread
    // as long as the QP is not destroyed meanwhile.
    virtual bool try_now(const SendWr&) { return false; }

    // To ERR: every outstanding request completes, those of unknown outcome with WR_FLUSH_ERR.
    // Once they have been polled, nothing of them is read from or written to local memory.
    virtual void to_error() = 0;

    // Responder: to ERR. True when the peer can no longer touch memory through this QP, whatever
    // it still has in its buffers or in the network; false when the deadline comes before that,
    // since the peer is on this host and stopped in the middle of a copy: call again to wait on.
    // Waits for nothing else. Whether its receives are still reported, flushed, is up to the
    // provider. Idempotent.
    virtual bool fence(Deadline deadline) = 0;
};

class ProtectionDomain {
  public:
    virtual ~ProtectionDomain() = default;
    virtual std::unique_ptr<MemoryRegion> register_memory(std::uint64_t addr, std::uint64_t length,
                                                          std::uint32_t access,
                                                          const SharedMemory& shared) = 0;
    // Whether register_memory() takes memory of GPUs.
    virtual bool takes_device_memory() const noexcept { return false; }
    // Created in INIT.
    virtual std::unique_ptr<QueuePair> create_qp(const QpInit& init) = 0;
};

// What a device is connected to, as far as its address tells.
struct Network {
    std::string
        kind;  // "RoCE v2 over IPv4", ...: devices of different kinds do not reach each other
    std::string subnet;  // "10.0.0.0/24", ...; empty where the address does not tell
};

// What a device reports by itself, at any time, on a thread of its own.
struct DeviceEvent {
    enum class Kind : std::uint8_t {
        PortDown,       // nothing gets through until PortActive
        PortActive,     // queue pairs can be connected
        AddressChange,  // those connected are cut off; new ones have another address
        DeviceFatal,    // no call on it succeeds any more
        QpFatal,        // of queue pair `qp_num`, which is in ERR
        Other,
    };
    Kind kind = Kind::Other;
    std::string text;
    std::uint32_t qp_num = 0;
};

class Device {
  public:
    virtual ~Device() = default;
    // No call of the handler before is under way when this returns.
    virtual void on_event(std::function<void(const DeviceEvent&)>) {}
    virtual const std::string& name() const noexcept = 0;
    virtual const DeviceAttributes& attributes() const noexcept = 0;
    virtual Network network() const = 0;
    virtual std::unique_ptr<ProtectionDomain> alloc_pd() = 0;
    virtual std::unique_ptr<CompletionQueue> create_cq(std::uint32_t max_cqe) = 0;
};

}  // namespace aioflagcx::verbs
