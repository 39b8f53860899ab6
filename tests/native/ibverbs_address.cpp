#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "common/error.h"
#include "verbs/ibverbs/address.h"

namespace aioflagcx::verbs::ibverbs {
namespace {

ibv_gid_entry entry(std::uint32_t index, std::uint32_t type,
                    const std::array<std::uint8_t, 16>& raw) {
    ibv_gid_entry made{};
    made.gid_index = index;
    made.gid_type = type;
    made.port_num = 1;
    std::memcpy(made.gid.raw, raw.data(), raw.size());
    return made;
}

constexpr Gid kIpv4{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 77, 0, 1};
constexpr Gid kGlobal{0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1};
constexpr Gid kLinkLocal{0xfe, 0x80, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 1};

std::uint32_t chosen(const std::vector<ibv_gid_entry>& entries,
                     std::optional<std::uint32_t> configured = {}) {
    return choose_gid(entries, configured, "mlx5_0").gid_index;
}

TEST(ChooseGid, PrefersRoutableAddressesOfRoceV2) {
    const auto v1 = entry(0, IBV_GID_TYPE_ROCE_V1, kIpv4);
    const auto local = entry(1, IBV_GID_TYPE_ROCE_V2, kLinkLocal);
    const auto global = entry(2, IBV_GID_TYPE_ROCE_V2, kGlobal);
    const auto ipv4 = entry(3, IBV_GID_TYPE_ROCE_V2, kIpv4);
    EXPECT_EQ(chosen({v1, local, global, ipv4}), 3U);
    EXPECT_EQ(chosen({v1, local, global}), 2U);
    EXPECT_EQ(chosen({v1, local}), 1U);
    EXPECT_EQ(chosen({v1}), 0U);
}

TEST(ChooseGid, TheConfiguredOneIsTakenWhateverItIs) {
    const auto v1 = entry(0, IBV_GID_TYPE_ROCE_V1, kIpv4);
    const auto ipv4 = entry(3, IBV_GID_TYPE_ROCE_V2, kIpv4);
    EXPECT_EQ(chosen({v1, ipv4}, 0), 0U);
}

TEST(ChooseGid, AnIndexThatIsNotThereIsToldWithThoseThatAre) {
    try {
        chosen({entry(3, IBV_GID_TYPE_ROCE_V2, kIpv4)}, 7);
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("index 7"), std::string::npos);
        EXPECT_NE(error.detail().find("3 ::ffff:10.77.0.1 (RoCE v2 over IPv4)"), std::string::npos);
    }
}

TEST(ChooseGid, APortWithoutAddressSaysSo) { EXPECT_THROW(chosen({}), NativeError); }

Address sample() {
    Address address;
    address.qpn = 0xabcdef;
    address.psn = 0x123456;
    address.lid = 7;
    address.mtu = IBV_MTU_4096;
    address.rd_atomic = 16;
    address.gid = kIpv4;
    address.kind = GidKind::RoceV2Ipv4;
    return address;
}

TEST(IbvAttributes, ComeBackAsTheyWere) {
    const Address back = from_map(to_map(sample()));
    EXPECT_EQ(back.qpn, 0xabcdefU);
    EXPECT_EQ(back.psn, 0x123456U);
    EXPECT_EQ(back.lid, 7U);
    EXPECT_EQ(back.mtu, static_cast<std::uint32_t>(IBV_MTU_4096));
    EXPECT_EQ(back.rd_atomic, 16U);
    EXPECT_EQ(back.gid, kIpv4);
    EXPECT_EQ(back.kind, GidKind::RoceV2Ipv4);
}

TEST(IbvAttributes, EveryMissingOrMalformedValueIsRefusedByName) {
    for (const auto& [key, value] : to_map(sample())) {
        Attributes without = to_map(sample());
        without.erase(key);
        EXPECT_THROW(from_map(without), NativeError) << key;
        Attributes wrong = to_map(sample());
        wrong[key] = std::vector<std::string>{"what is this?"};
        EXPECT_THROW(from_map(wrong), NativeError) << key;
        wrong[key] = std::uint64_t{1} << 40;
        EXPECT_THROW(from_map(wrong), NativeError) << key;
    }
    Attributes soft = to_map(sample());
    soft["provider"] = std::string("soft");
    try {
        from_map(soft);
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("'soft'"), std::string::npos);
    }
}

TEST(IbvAttributes, GidTypesThatDoNotFitAreBothNamed) {
    Address other = sample();
    other.gid = kGlobal;
    other.kind = GidKind::RoceV2Ipv6;
    EXPECT_NO_THROW(check_match(sample(), sample()));
    try {
        check_match(sample(), other);
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("::ffff:10.77.0.1 (RoCE v2 over IPv4)"), std::string::npos);
        EXPECT_NE(error.detail().find("2001:db8::1 (RoCE v2 over IPv6)"), std::string::npos);
    }
}

constexpr Gid kInfiniBand{0xfe, 0x80, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 1};

TEST(IbvNetwork, IsTheSubnetOfTheAddress) {
    EXPECT_EQ(network_of(kIpv4, GidKind::RoceV2Ipv4, 24).subnet, "10.77.0.0/24");
    EXPECT_EQ(network_of(kIpv4, GidKind::RoceV2Ipv4, 13).subnet, "10.72.0.0/13");
    EXPECT_EQ(network_of(kIpv4, GidKind::RoceV2Ipv4, 32).subnet, "10.77.0.1/32");
    EXPECT_EQ(network_of(kIpv4, GidKind::RoceV1, 24).subnet, "10.77.0.0/24");
    EXPECT_EQ(network_of(kGlobal, GidKind::RoceV2Ipv6, 64).subnet, "2001:db8::/64");
    EXPECT_EQ(network_of(kGlobal, GidKind::RoceV2Ipv6, 127).subnet, "2001:db8::/127");
    EXPECT_EQ(network_of(kGlobal, GidKind::RoceV2Ipv6, 64).kind, "RoCE v2 over IPv6");
}

TEST(IbvNetwork, InfiniBandsIsItsSubnetPrefix) {
    EXPECT_EQ(network_of(kInfiniBand, GidKind::InfiniBand, 0).subnet, "fe80:0:0:1::/64");
    Gid other = kInfiniBand;
    other[15] = 2;
    EXPECT_TRUE(same_subnet(kInfiniBand, other));
    other[7] = 2;
    EXPECT_FALSE(same_subnet(kInfiniBand, other));
}

TEST(IbvNetwork, ALinkLocalAddressTellsNothingOfIt) {
    EXPECT_EQ(network_of(kLinkLocal, GidKind::RoceV2Local, 64).subnet, "");
    EXPECT_EQ(network_of(kLinkLocal, GidKind::RoceV1, 64).subnet, "");
}

TEST(IbvNetwork, PrefixLengthsAreThoseOfTheInterfaces) {
    Gid loopback = kIpv4;
    const std::array<std::uint8_t, 4> localhost{127, 0, 0, 1};
    std::copy(localhost.begin(), localhost.end(), loopback.begin() + 12);
    EXPECT_EQ(prefix_length(loopback), 8U);
    const Gid documentation{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1};  // nobody's
    EXPECT_EQ(prefix_length(documentation), 24U);
    EXPECT_EQ(prefix_length(kGlobal), 64U);
}

}  // namespace
}  // namespace aioflagcx::verbs::ibverbs
