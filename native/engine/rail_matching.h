// Which devices of two hosts make rails.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "verbs/verbs.h"

namespace aioflagcx::engine {

struct DevicePair {
    std::uint32_t local = 0;
    std::optional<std::uint32_t> remote;  // none: as the peer chooses

    friend bool operator==(const DevicePair&, const DevicePair&) = default;
};

// Devices of one subnet are paired: the first of ours there with the first of theirs and so on,
// with turns for the side that has fewer of them. When any two share a subnet, those without a
// counterpart are left out: whether a router joins them is not to be seen, and a rail that leads
// nowhere holds up each transfer that tries it. When none do, every device is behind a router or
// has an address that tells nothing, and those of one kind are paired in the same way; when not
// even kinds fit, all are, so that connecting them says why they do not. At most kMaxRails pairs.
std::vector<DevicePair> match_devices(std::span<const verbs::Network> ours,
                                      std::span<const verbs::Network> theirs);

}  // namespace aioflagcx::engine
