// The engine's fixed numbers. What a deployment may want to tune is in EngineOptions instead.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>

namespace aioflagcx::engine {

// Completions taken from a CQ in one poll: large enough to amortise the call, small enough that
// posting gets its turn between two polls.
inline constexpr std::size_t kPollBatch = 64;

// Receives posted on a responder QP. Each takes one zero-length immediate of a notify; the worker
// reposts at once, so this bounds only how many arrive between two of its turns.
inline constexpr std::uint32_t kReceiveDepth = 128;

// Rails of one session: more devices than a host has, and few enough to look at all of them.
inline constexpr std::uint32_t kMaxRails = 16;

// Rails that are counted by name, of all peers together: hundreds of peers call theirs alike, and a
// hostile one's names must not add up without end.
inline constexpr std::size_t kMaxRailNames = 1'024;

// Queue pairs a peer may have on one rail; Config allows no more.
inline constexpr std::size_t kMaxQpsPerRail = 64;

// Changes of the MR table kept for deltas. A peer further behind gets the whole table.
inline constexpr std::size_t kTableLogLength = 65'536;

// Immediates that came before their notify message, remembered per responder. The initiator sends
// the message right after them, so more than this many means a peer that never sends it.
inline constexpr std::size_t kMaxPendingImmediates = 65'536;

// Keepalive connections that have not yet presented a token; one more drops the oldest, since an
// honest initiator presents its own at once.
inline constexpr std::size_t kMaxKeepaliveStrangers = 256;

// A keepalive connection must present its token within this time.
inline constexpr std::chrono::seconds kKeepaliveHelloTimeout{5};

// A peer's MR table may hold at most this many regions or keys: 64 bytes each stay far below what
// a control-plane frame can carry, so a larger count in a header is a broken or hostile table.
inline constexpr std::uint32_t kMaxTableEntries = 1u << 24;

// Bytes of all names in a peer's MR table; keeps their offsets far inside 32 bits.
inline constexpr std::uint64_t kMaxTableNames = 1u << 30;

// Keepalive connections accepted before established ones get their turn.
inline constexpr int kKeepaliveAcceptsPerTurn = 64;

// Beats a peer can make us send: Config allows no shorter interval.
inline constexpr std::chrono::milliseconds kMinKeepaliveInterval{10};

// Kernel buffers of a keepalive connection, in each direction: thousands of beats, so that ticks we
// miss hold nobody up, and next to nothing when a peer sends or leaves unread what it can.
inline constexpr int kKeepaliveBuffer = 16'384;

// Bytes read from a keepalive connection in one tick; any of them is a sign of life.
inline constexpr std::size_t kKeepaliveReadAtOnce = 4'096;

// Out of descriptors: how long the keepalive listener rests, so that it does not spin.
inline constexpr std::chrono::milliseconds kKeepaliveAcceptPause{100};

// Most bytes of a transfer that the calling thread copies by itself: about 1 us, less than waking a
// worker takes.
inline constexpr std::uint64_t kNowBytes = 16'384;

// Most bytes of a transfer that is left to one lane of an idle session: more are shared by all.
inline constexpr std::uint64_t kOneLaneBytes = 131'072;

// Bytes that a lane may have outstanding beside other rails before anybody knows how fast it is:
// what 400 Gbit/s carry in 20 us, and a slow rail does not hold a transfer up with.
inline constexpr std::uint64_t kFirstWindow = 1u << 20;

// Bytes of one lane after which what all have completed counts half: a change of a rail's speed
// shows after about as many.
inline constexpr std::uint64_t kLatelyBytes = 64u << 20;

// Bytes from which on the devices register memory at the same time, each on a thread of its own:
// pinning so much takes a NIC's driver milliseconds, starting a thread a twentieth of one.
inline constexpr std::uint64_t kParallelRegistration = 16u << 20;

// Soft devices of one engine: each has threads of its own.
inline constexpr std::uint32_t kMaxSoftDevices = 16;

// Closing an engine: how long a peer may take to finish the copy it is inside of. One takes under a
// millisecond, so a peer that needs longer is stopped.
inline constexpr std::chrono::seconds kClosePatience{1};

}  // namespace aioflagcx::engine
