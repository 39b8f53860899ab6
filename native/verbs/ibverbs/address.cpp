#include "verbs/ibverbs/address.h"

#include <arpa/inet.h>
#include <ifaddrs.h>
#include <netinet/in.h>

#include <algorithm>
#include <bit>
#include <cerrno>
#include <cstring>
#include <limits>

#include "common/error.h"

namespace aioflagcx::verbs::ibverbs {

namespace {

constexpr std::array<std::uint8_t, 12> kIpv4Mapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr std::uint32_t kQpnBits = 0xffffff;  // queue pair and packet numbers have 24 bits

bool is_ipv4_mapped(const std::uint8_t* raw) noexcept {
    return std::memcmp(raw, kIpv4Mapped.data(), kIpv4Mapped.size()) == 0;
}

bool is_link_local(const std::uint8_t* raw) noexcept {
    return raw[0] == 0xfe && (raw[1] & 0xc0) == 0x80;  // RFC 4291, 2.5.6
}

Gid to_gid(const ibv_gid& gid) noexcept {
    Gid bytes;
    std::memcpy(bytes.data(), gid.raw, bytes.size());
    return bytes;
}

[[noreturn]] void reject(const std::string& key, const char* why) {
    throw NativeError("peer attributes", EPROTO, "'" + key + "' " + why);
}

std::uint32_t number(const Attributes& map, const std::string& key, std::uint64_t max) {
    const auto found = map.find(key);
    if (found == map.end()) reject(key, "is missing");
    const auto* value = std::get_if<std::uint64_t>(&found->second);
    if (value == nullptr || *value > max) reject(key, "is no number in its range");
    return static_cast<std::uint32_t>(*value);
}

// Of an IPv4 or IPv6 address.
const std::uint8_t* address_bytes(const sockaddr* address) noexcept {
    if (address->sa_family == AF_INET) {
        return reinterpret_cast<const std::uint8_t*>(
            &reinterpret_cast<const sockaddr_in*>(address)->sin_addr);
    }
    return reinterpret_cast<const sockaddr_in6*>(address)->sin6_addr.s6_addr;
}

// Smaller is better.
int preference(GidKind kind) noexcept { return static_cast<int>(kind); }

}  // namespace

const char* gid_kind_name(GidKind kind) noexcept {
    switch (kind) {
        case GidKind::InfiniBand:
            return "InfiniBand";
        case GidKind::RoceV2Ipv4:
            return "RoCE v2 over IPv4";
        case GidKind::RoceV2Ipv6:
            return "RoCE v2 over IPv6";
        case GidKind::RoceV2Local:
            return "RoCE v2 with a link-local address";
        case GidKind::RoceV1:
            break;
    }
    return "RoCE v1";
}

GidKind gid_kind(const ibv_gid_entry& entry) noexcept {
    if (entry.gid_type == IBV_GID_TYPE_IB) return GidKind::InfiniBand;
    if (entry.gid_type == IBV_GID_TYPE_ROCE_V1) return GidKind::RoceV1;
    if (is_ipv4_mapped(entry.gid.raw)) return GidKind::RoceV2Ipv4;
    return is_link_local(entry.gid.raw) ? GidKind::RoceV2Local : GidKind::RoceV2Ipv6;
}

std::string gid_text(const Gid& gid) {
    std::array<char, INET6_ADDRSTRLEN> text{};
    ::inet_ntop(AF_INET6, gid.data(), text.data(), text.size());
    return text.data();
}

ibv_gid_entry choose_gid(std::span<const ibv_gid_entry> entries,
                         std::optional<std::uint32_t> configured, const std::string& device) {
    std::string there;
    for (const ibv_gid_entry& entry : entries) {
        if (configured && entry.gid_index == *configured) return entry;
        there += (there.empty() ? "" : ", ") + std::to_string(entry.gid_index) + " " +
                 gid_text(to_gid(entry.gid)) + " (" + gid_kind_name(gid_kind(entry)) + ")";
    }
    if (configured) {
        throw NativeError("query GID", ENOENT,
                          device + " has no GID with index " + std::to_string(*configured) +
                              " (gid_index); there are: " + there);
    }
    const auto best = std::min_element(entries.begin(), entries.end(),
                                       [](const ibv_gid_entry& a, const ibv_gid_entry& b) {
                                           return preference(gid_kind(a)) < preference(gid_kind(b));
                                       });
    if (best == entries.end()) {
        throw NativeError("query GID", ENOENT,
                          device + " has no GID: its network interface has no address");
    }
    return *best;
}

Attributes to_map(const Address& address) {
    return {
        {"provider", std::string("ibverbs")},
        {"qpn", std::uint64_t{address.qpn}},
        {"psn", std::uint64_t{address.psn}},
        {"lid", std::uint64_t{address.lid}},
        {"mtu", std::uint64_t{address.mtu}},
        {"rd_atomic", std::uint64_t{address.rd_atomic}},
        {"gid", Bytes(address.gid.begin(), address.gid.end())},
        {"gid_kind", std::uint64_t{static_cast<std::uint8_t>(address.kind)}},
    };
}

Address from_map(const Attributes& map) {
    const auto provider = map.find("provider");
    const auto* name =
        provider == map.end() ? nullptr : std::get_if<std::string>(&provider->second);
    if (name == nullptr) reject("provider", "is missing");
    if (*name != "ibverbs") {
        throw NativeError("peer attributes", EPROTONOSUPPORT,
                          "this end has an RDMA device and the peer's is '" + name->substr(0, 32) +
                              "': give both the same kind (devices)");
    }
    Address address;
    address.qpn = number(map, "qpn", kQpnBits);
    address.psn = number(map, "psn", kQpnBits);
    address.lid =
        static_cast<std::uint16_t>(number(map, "lid", std::numeric_limits<std::uint16_t>::max()));
    address.mtu = number(map, "mtu", IBV_MTU_4096);
    if (address.mtu < IBV_MTU_256) reject("mtu", "is no enum ibv_mtu");
    address.rd_atomic = number(map, "rd_atomic", 255);
    address.kind =
        static_cast<GidKind>(number(map, "gid_kind", static_cast<std::uint8_t>(GidKind::RoceV1)));
    const auto gid = map.find("gid");
    const auto* bytes = gid == map.end() ? nullptr : std::get_if<Bytes>(&gid->second);
    if (bytes == nullptr || bytes->size() != address.gid.size()) reject("gid", "is not 16 bytes");
    std::copy(bytes->begin(), bytes->end(), address.gid.begin());
    return address;
}

void check_match(const Address& local, const Address& remote) {
    if (local.kind == remote.kind) return;
    throw NativeError("connect", EPROTONOSUPPORT,
                      std::string("the GID types do not fit: here ") + gid_text(local.gid) + " (" +
                          gid_kind_name(local.kind) + "), at the peer " + gid_text(remote.gid) +
                          " (" + gid_kind_name(remote.kind) + "); choose one with gid_index");
}

std::uint32_t prefix_length(const Gid& gid) {
    const bool ipv4 = is_ipv4_mapped(gid.data());
    const int family = ipv4 ? AF_INET : AF_INET6;
    const std::size_t skipped = ipv4 ? kIpv4Mapped.size() : 0;
    const std::size_t size = gid.size() - skipped;
    std::uint32_t found = ipv4 ? 24 : 64;
    ifaddrs* addresses = nullptr;
    if (::getifaddrs(&addresses) != 0) return found;
    for (const ifaddrs* one = addresses; one != nullptr; one = one->ifa_next) {
        if (one->ifa_addr == nullptr || one->ifa_netmask == nullptr) continue;
        if (one->ifa_addr->sa_family != family) continue;
        if (std::memcmp(address_bytes(one->ifa_addr), gid.data() + skipped, size) != 0) continue;
        const std::uint8_t* const mask = address_bytes(one->ifa_netmask);
        found = 0;
        for (std::size_t i = 0; i < size; ++i) {
            found += static_cast<std::uint32_t>(std::popcount(mask[i]));
        }
        break;
    }
    ::freeifaddrs(addresses);
    return found;
}

Network network_of(const Gid& gid, GidKind kind, std::uint32_t prefix_length) {
    Network network{gid_kind_name(kind), {}};
    if (kind == GidKind::InfiniBand) {
        prefix_length = 64;
    } else if (is_link_local(gid.data())) {
        return network;
    }
    const bool ipv4 = kind != GidKind::InfiniBand && is_ipv4_mapped(gid.data());
    const std::size_t skipped = ipv4 ? kIpv4Mapped.size() : 0;
    const std::size_t bits = std::min<std::size_t>(prefix_length, 8 * (gid.size() - skipped));
    std::array<std::uint8_t, sizeof(Gid)> masked{};
    for (std::size_t bit = 0; bit < bits; ++bit) {
        masked[bit / 8] |= static_cast<std::uint8_t>(gid[skipped + bit / 8] & (0x80 >> bit % 8));
    }
    std::array<char, INET6_ADDRSTRLEN> text{};
    ::inet_ntop(ipv4 ? AF_INET : AF_INET6, masked.data(), text.data(), text.size());
    network.subnet = std::string(text.data()) + "/" + std::to_string(prefix_length);
    return network;
}

bool same_subnet(const Gid& local, const Gid& remote) noexcept {
    return std::equal(local.begin(), local.begin() + 8, remote.begin());
}

}  // namespace aioflagcx::verbs::ibverbs
