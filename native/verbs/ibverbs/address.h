// How a queue pair on another host is reached: LID or GID, and whether two ports fit together.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "verbs/types.h"

namespace aioflagcx::verbs::ibverbs {

using Gid = std::array<std::uint8_t, 16>;

enum class GidKind : std::uint8_t {
    InfiniBand,   // subnet prefix and GUID
    RoceV2Ipv4,   // an IPv4-mapped address
    RoceV2Ipv6,   // a global IPv6 address
    RoceV2Local,  // a link-local IPv6 address
    RoceV1,       // Ethernet only, not routed
};

const char* gid_kind_name(GidKind kind) noexcept;
GidKind gid_kind(const ibv_gid_entry& entry) noexcept;

// "::ffff:10.0.0.1", "fe80::1", ...
std::string gid_text(const Gid& gid);

// The entry of a port's GID table to use: the configured one or, without, RoCE v2 with an
// IPv4-mapped address, then with a global IPv6 address, link-local only when there is nothing else,
// then RoCE v1. On InfiniBand the first. Throws NativeError listing what there is.
ibv_gid_entry choose_gid(std::span<const ibv_gid_entry> entries,
                         std::optional<std::uint32_t> configured, const std::string& device);

// One end of a queue pair, as the handshake carries it.
struct Address {
    std::uint32_t qpn = 0;
    std::uint32_t psn = 0;
    std::uint16_t lid = 0;
    std::uint32_t mtu = 0;        // enum ibv_mtu
    std::uint32_t rd_atomic = 0;  // reads it answers at once
    Gid gid{};
    GidKind kind = GidKind::InfiniBand;
    std::uint32_t port_speed = 0;  // for the log only
};

Attributes to_map(const Address& address);

// Throws NativeError (EPROTO) naming the key whose value is missing or not as it must be.
Address from_map(const Attributes& map);

// Throws NativeError (EPROTONOSUPPORT) saying which GID types do not fit.
void check_match(const Address& local, const Address& remote);

// Whether they are in the same subnet: for InfiniBand of one prefix, for RoCE with addresses of one
// /24 (IPv4) or /64 (IPv6), which is how hosts with several NICs are set up.
bool same_subnet(const Address& local, const Address& remote) noexcept;

}  // namespace aioflagcx::verbs::ibverbs
