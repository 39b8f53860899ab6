#include "engine/rail_matching.h"

#include <algorithm>
#include <string>
#include <utility>

#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

// What devices must have in common; nothing: the device takes no part.
using Key = std::optional<std::pair<std::string, std::string>>;

Key by_subnet(const verbs::Network& network) {
    if (network.subnet.empty()) return std::nullopt;
    return std::pair(network.kind, network.subnet);
}

Key by_kind(const verbs::Network& network) { return std::pair(network.kind, std::string()); }

Key by_index(const verbs::Network&) { return std::pair(std::string(), std::string()); }

std::vector<std::uint32_t> having(const Key& key, std::span<const verbs::Network> networks,
                                  Key (*key_of)(const verbs::Network&)) {
    std::vector<std::uint32_t> found;
    for (std::uint32_t i = 0; i < networks.size(); ++i) {
        if (key_of(networks[i]) == key) found.push_back(i);
    }
    return found;
}

// Devices with one key.
struct Group {
    std::vector<std::uint32_t> ours;
    std::vector<std::uint32_t> theirs;

    std::size_t rails() const { return std::max(ours.size(), theirs.size()); }
};

std::vector<DevicePair> match(std::span<const verbs::Network> ours,
                              std::span<const verbs::Network> theirs,
                              Key (*key_of)(const verbs::Network&)) {
    std::vector<Group> groups;
    std::size_t turns = 0;
    for (std::uint32_t i = 0; i < ours.size(); ++i) {
        const Key key = key_of(ours[i]);
        if (!key) continue;
        Group group{having(key, ours, key_of), having(key, theirs, key_of)};
        if (group.ours.front() != i || group.theirs.empty()) continue;
        turns = std::max(turns, group.rails());
        groups.push_back(std::move(group));
    }
    // By turns, so that too many of one group push no other one out.
    std::vector<DevicePair> pairs;
    for (std::size_t turn = 0; turn < turns; ++turn) {
        for (const Group& group : groups) {
            if (turn >= group.rails() || pairs.size() == kMaxRails) continue;
            pairs.push_back(
                {group.ours[turn % group.ours.size()], group.theirs[turn % group.theirs.size()]});
        }
    }
    return pairs;
}

}  // namespace

std::vector<DevicePair> match_devices(std::span<const verbs::Network> ours,
                                      std::span<const verbs::Network> theirs) {
    for (const auto key_of : {&by_subnet, &by_kind, &by_index}) {
        auto pairs = match(ours, theirs, key_of);
        if (!pairs.empty()) return pairs;
    }
    return {};
}

}  // namespace aioflagcx::engine
