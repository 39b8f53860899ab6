// Every tunable of the soft device, with its unit and reason.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace aioflagcx::verbs::soft {

// ---- What a Device reports -------------------------------------------------------------------

// Requests a QP may hold in each direction; NICs offer 16 to 32 Ki.
inline constexpr std::uint32_t kMaxQpWr = 16384;
// Completions a CQ may hold: 256 full send queues.
inline constexpr std::uint32_t kMaxCqe = 1U << 22;
// Bytes of one memory region: half of the address space, so that sums never wrap.
inline constexpr std::uint64_t kMaxMrSize = std::uint64_t{1} << 63;
// Bytes of one request: InfiniBand's own limit is 2^31.
inline constexpr std::uint32_t kMaxMessage = 0x7fffffff;
// Worker threads it asks for, on a machine with as many cores: each copies at the speed of one
// core, and a few of them at that of the memory.
inline constexpr std::uint32_t kMaxWorkers = 4;

// ---- Process path ----------------------------------------------------------------------------

// Bytes copied per entry of the target's gates: bounds how long fence() and deregistration wait
// (about 0.1 ms), and is large enough that entering them costs nothing.
inline constexpr std::size_t kCopyBytes = std::size_t{1} << 20;

// ---- Local path ------------------------------------------------------------------------------

// Regions and connected QPs the shared table has room for. It is a sparse file: 32 MiB of address
// space, of which only what is used takes memory.
inline constexpr std::size_t kLocalRegions = std::size_t{1} << 20;
inline constexpr std::size_t kLocalGates = std::size_t{1} << 14;
// Different regions one copy may use: a system call of 64 KiB pieces has at most as many.
inline constexpr std::size_t kAnnouncedKeys = 64;
// One process_vm_writev or process_vm_readv: bounds how long fence() and deregistration wait
// (about 0.4 ms), and is large enough that the call itself costs nothing. IOV_MAX is 1,024.
inline constexpr std::size_t kCallBytes = std::size_t{4} << 20;
inline constexpr std::size_t kCallPieces = 1024;
// Messages of one peer that are answered before others get their turn.
inline constexpr int kMessagesPerTurn = 64;
// Bytes of one step of a copy to mapped memory: some 5 us.
inline constexpr std::size_t kGuardedBytes = std::size_t{1} << 16;
// How a thread waits for a process that is inside a copy: looks, then naps that grow.
inline constexpr int kLooks = 200;
inline constexpr std::chrono::microseconds kFirstNap{20};
inline constexpr std::chrono::microseconds kLongestNap{1000};
// How long a thread must be seen to be stopped: far longer than it takes to leave its processor
// after it has said so.
inline constexpr std::chrono::milliseconds kStoppedFor{5};

// ---- TCP path --------------------------------------------------------------------------------

// Streams of one QP a peer may ask for.
inline constexpr std::uint32_t kMaxStreams = 64;
// Requests in one frame: their pieces fit one sendmsg, and their descriptors (776 bytes) one page.
inline constexpr std::uint32_t kFrameRequests = 32;
// Payload bytes after which a frame takes no further request; a longer request has its own frame.
inline constexpr std::size_t kFrameBytes = std::size_t{1} << 20;
// Bytes one stream may move before others get their turn (about 0.2 ms). It also bounds one
// system call, and with it how long fence() and deregistration wait.
inline constexpr std::size_t kTurnBytes = std::size_t{1} << 20;
// Bytes of read data under one response header: a turn's worth, which moves some 5 % more than a
// quarter of it. What is left of it must still be sent, as zeros, when the memory goes away in the
// middle, so it is not larger than it need be.
inline constexpr std::size_t kResponseBytes = kTurnBytes;
// Read requests a responder's stream holds before it stops taking requests: 24 bytes each on the
// wire, so a peer that never reads its responses costs a bounded amount of memory.
inline constexpr std::size_t kMaxResponses = 256;
// Response headers taken by one receive when no read data can be among them.
inline constexpr std::size_t kHeadersAtOnce = 64;

// How long a new connection may take to say hello.
inline constexpr std::chrono::seconds kHelloTimeout{5};
// Connections that have not said hello yet; one more drops the oldest, since an honest initiator
// says hello at once.
inline constexpr std::size_t kMaxHellos = 256;
// Connections accepted before established streams get their turn.
inline constexpr int kAcceptsPerTurn = 64;
// Out of descriptors: how long the listener rests, so that it does not spin.
inline constexpr std::chrono::milliseconds kAcceptPause{100};
// How long a failed QP's streams stay open for the initiator to read why: closing them at once
// could reset the connection under the answer.
inline constexpr std::chrono::seconds kLingerTime{5};
// Events taken by one epoll_wait.
inline constexpr int kEventsAtOnce = 64;

// ---- Memory ----------------------------------------------------------------------------------

// Keys each stream and initiator remembers, so that most requests skip the table's lock.
inline constexpr std::size_t kMrCacheSlots = 16;

}  // namespace aioflagcx::verbs::soft
