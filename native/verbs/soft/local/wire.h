// Messages on a local connection (Unix, SOCK_SEQPACKET, one packet each), version 1. Both ends are
// on one machine, so integers are as they lie in memory.
//
//   initiator  Open     which responder QP it was told of, and who it is
//   target     Offered  where a nonce lies in the target, and the layout of what it shares
//              Refused  why not, in words
//   initiator  Enter    as Open; it has read the nonce, so it may copy. Until here it could leave
//                       for another path without harm; from here on the QP ends with the connection
//   target     Opened   with three descriptors: the MR table, the announcement page, and one end of
//                       a stream for requests that need the target (docs/data-streams.md)
//              Refused
//   initiator  Lend     asks for the file behind a key
//   target     Lent     with its descriptor, or without: not any more
//              Recall   the region is going: unmap it
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "verbs/soft/token.h"

namespace aioflagcx::verbs::soft::local {

inline constexpr std::uint32_t kMagic = 0x4C434641;  // "AFCL"
inline constexpr std::uint16_t kWireVersion = 1;

enum class Kind : std::uint16_t {
    Open = 1,
    Offered = 2,
    Refused = 3,
    Enter = 4,
    Opened = 5,
    Lend = 6,
    Lent = 7,
    Recall = 8,
};

// Every message has the same form; what a kind does not use is zero.
struct Message {
    std::uint32_t magic = kMagic;
    std::uint16_t version = kWireVersion;
    Kind kind{};
    Token target{};     // Open, Enter: the responder's; Opened: the table's name
    Token initiator{};  // Open, Enter
    Token nonce{};      // Offered: what lies at nonce_addr in the target
    std::uint64_t nonce_addr = 0;
    std::uint64_t offset = 0;  // Lent: of the region in the file
    std::uint32_t key = 0;     // Lend, Lent, Recall
    std::int32_t pid = 0;      // Opened: of the initiator, as the target sees it
    std::uint32_t gate = 0;    // Opened: where the QP's gate is, and what it holds while open
    std::uint32_t ticket = 0;
    std::uint32_t regions = 0;  // Offered: entries and gates of the table, and keys of the page,
    std::uint32_t gates = 0;    // as the target knows the layout
    std::uint32_t keys = 0;
    std::array<char, 92> reason{};  // Refused
};
static_assert(sizeof(Message) == 192);

}  // namespace aioflagcx::verbs::soft::local
