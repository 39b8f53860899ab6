// How a queue pair on another host is reached: LID or GID, and whether two ports fit together.
#pragma once

#include <infiniband/verbs.h>

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "verbs/types.h"
#include "verbs/verbs.h"

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

// How many leading bits of a RoCE GID's address name its subnet. A GID does not tell; the network
// interface that has the address does. Of an address of another network namespace nobody here
// knows: then it is 24 for IPv4 and 64 for IPv6, as most subnets of hosts are.
std::uint32_t prefix_length(const Gid& gid);

// `prefix_length` counts for RoCE only, and a link-local address names no subnet. InfiniBand's
// subnet is the first half of the GID.
Network network_of(const Gid& gid, GidKind kind, std::uint32_t prefix_length);

// Whether InfiniBand ports have one subnet prefix, and so reach each other by LID.
bool same_subnet(const Gid& local, const Gid& remote) noexcept;

}  // namespace aioflagcx::verbs::ibverbs
