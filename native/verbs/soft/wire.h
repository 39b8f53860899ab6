// The TCP path's wire format, version 1. All integers are little-endian and of fixed width.
//
// A connection begins with the initiator's Hello, which names the stream and proves by the
// responder's token that the handshake allowed it, and the responder's HelloReply. A responder
// that refuses closes the connection without an answer.
//
// Initiator to responder: frames. A frame is a FrameHeader, `count` Requests, and the payloads of
// its writes and sends back to back, `payload` bytes in all.
//
// Responder to initiator: Responses, in the order of the stream's requests. Requests are counted
// per stream from 0; `index` is
//   Ack       the number of requests answered so far: all below it have been carried out
//   ReadData  the first request whose bytes follow. `length` bytes follow, which continue the
//             concatenation of all read data of the stream; a request's bytes may be cut anywhere.
//             A read is complete only when it is acknowledged.
//   NotReady  a request that found no posted receive; all below it have been carried out. It is to
//             be sent again, under a new number, after the time `detail` encodes (min_rnr_timer).
//   Nack      a request that failed with the status `detail`; all below it have been carried out.
//             No request of the QP touches memory any more.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft::wire {

static_assert(std::endian::native == std::endian::little,
              "the structs below are sent as they lie in memory");

inline constexpr std::uint32_t kHelloMagic = 0x58434641;  // "AFCX"
inline constexpr std::uint16_t kVersion = 1;
inline constexpr std::uint16_t kFrameMagic = 0xAF51;
inline constexpr std::uint16_t kResponseMagic = 0xAF52;

struct Hello {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t stream;  // below the initiator's "streams"
    std::array<std::uint8_t, 16> token;
};
static_assert(sizeof(Hello) == 24);

struct HelloReply {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t stream;
};
static_assert(sizeof(HelloReply) == 8);

struct FrameHeader {
    std::uint16_t magic;
    std::uint16_t count;  // 1 to kFrameRequests
    std::uint32_t payload;
};
static_assert(sizeof(FrameHeader) == 8);

struct Request {
    std::uint8_t opcode;  // WrOpcode
    std::array<std::uint8_t, 3> zero;
    std::uint32_t length;
    std::uint32_t rkey;
    std::uint32_t imm;
    std::uint64_t remote_addr;
};
static_assert(sizeof(Request) == 24);

enum class ResponseKind : std::uint8_t { Ack = 1, ReadData = 2, NotReady = 3, Nack = 4 };

struct Response {
    std::uint16_t magic;
    ResponseKind kind;
    std::uint8_t detail;
    std::uint32_t length;
    std::uint64_t index;
};
static_assert(sizeof(Response) == 16);

// Every frame has at least one request, so this much can be read ahead without taking payload.
inline constexpr std::size_t kFrameStart = sizeof(FrameHeader) + sizeof(Request);
inline constexpr std::size_t kFrameMeta = sizeof(FrameHeader) + kFrameRequests * sizeof(Request);

}  // namespace aioflagcx::verbs::soft::wire
