// Which devices make rails: by subnet, else by kind and index.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "engine/limits.h"
#include "engine/rail_matching.h"

namespace aioflagcx::engine {
namespace {

using Networks = std::vector<verbs::Network>;
using Pairs = std::vector<DevicePair>;

const std::string kIpv4 = "RoCE v2 over IPv4";
const std::string kInfiniBand = "InfiniBand";

Networks ipv4(const std::vector<std::string>& subnets) {
    Networks networks;
    for (const std::string& subnet : subnets) networks.push_back({kIpv4, subnet});
    return networks;
}

Networks soft(std::size_t count) { return Networks(count, {"soft", ""}); }

TEST(RailMatching, DevicesOfOneSubnetInWhateverOrderTheyAreNamed) {
    EXPECT_EQ(match_devices(ipv4({"a", "b", "c"}), ipv4({"c", "a", "b"})),
              (Pairs{{0, 1}, {1, 2}, {2, 0}}));
}

TEST(RailMatching, AFlatNetworkIsPairedByIndex) {
    EXPECT_EQ(match_devices(ipv4({"a", "a", "a"}), ipv4({"a", "a", "a"})),
              (Pairs{{0, 0}, {1, 1}, {2, 2}}));
}

TEST(RailMatching, TheSideWithFewerDevicesOfASubnetTakesTurns) {
    EXPECT_EQ(match_devices(ipv4({"a"}), ipv4({"a", "a", "a"})), (Pairs{{0, 0}, {0, 1}, {0, 2}}));
    EXPECT_EQ(match_devices(ipv4({"a", "a", "a"}), ipv4({"a", "a"})),
              (Pairs{{0, 0}, {1, 1}, {2, 0}}));
    EXPECT_EQ(match_devices(ipv4({"a", "b", "a"}), ipv4({"b", "a", "b"})),
              (Pairs{{0, 1}, {1, 0}, {2, 1}, {1, 2}}));
}

TEST(RailMatching, WithoutACounterpartADeviceIsLeftOut) {
    EXPECT_EQ(match_devices(ipv4({"a", "b"}), ipv4({"b"})), (Pairs{{1, 0}}));
    EXPECT_EQ(match_devices(ipv4({"a"}), ipv4({"storage", "a"})), (Pairs{{0, 1}}));
    EXPECT_EQ(match_devices(ipv4({"a", "b"}), ipv4({"a", "c"})), (Pairs{{0, 0}}));
}

TEST(RailMatching, BehindRoutersByIndex) {
    EXPECT_EQ(match_devices(ipv4({"a", "b"}), ipv4({"c", "d"})), (Pairs{{0, 0}, {1, 1}}));
    EXPECT_EQ(match_devices(ipv4({"a", "b"}), ipv4({"c"})), (Pairs{{0, 0}, {1, 0}}));
    EXPECT_EQ(match_devices(soft(2), soft(3)), (Pairs{{0, 0}, {1, 1}, {0, 2}}));
}

TEST(RailMatching, OneSubnetOfTwoKindsIsTwo) {
    const Networks ours{{kInfiniBand, "fe80::/64"}, {"RoCE v1", "fe80::/64"}};
    const Networks theirs{{"RoCE v1", "fe80::/64"}, {kInfiniBand, "fe80::/64"}};
    EXPECT_EQ(match_devices(ours, theirs), (Pairs{{0, 1}, {1, 0}}));
}

TEST(RailMatching, AnUnknownSubnetIsNobodys) {
    EXPECT_EQ(match_devices(ipv4({"", "a"}), ipv4({"", "a"})), (Pairs{{1, 1}}));
    EXPECT_EQ(match_devices(ipv4({"", "a"}), ipv4({"", "b"})), (Pairs{{0, 0}, {1, 1}}));
}

TEST(RailMatching, KindsBeforeIndex) {
    const Networks ours{{kInfiniBand, "x"}, {kIpv4, "a"}};
    const Networks theirs{{kIpv4, "b"}, {kIpv4, "c"}, {kInfiniBand, "y"}};
    EXPECT_EQ(match_devices(ours, theirs), (Pairs{{0, 2}, {1, 0}, {1, 1}}));
}

TEST(RailMatching, WhatCannotFitIsPairedSoThatConnectingTellsWhy) {
    EXPECT_EQ(match_devices(soft(1), ipv4({"a", "b"})), (Pairs{{0, 0}, {0, 1}}));
}

TEST(RailMatching, TooManyOfOneSubnetLeaveTheOthersTheirs) {
    Networks theirs(2 * kMaxRails, {kIpv4, "a"});
    theirs.push_back({kIpv4, "b"});
    const Pairs pairs = match_devices(ipv4({"a", "b"}), theirs);
    EXPECT_EQ(pairs.size(), kMaxRails);
    EXPECT_EQ(pairs[1], (DevicePair{1, 2 * kMaxRails}));
    EXPECT_EQ(pairs.back(), (DevicePair{0, kMaxRails - 2}));
}

}  // namespace
}  // namespace aioflagcx::engine
