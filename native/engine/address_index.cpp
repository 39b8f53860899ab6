#include "engine/address_index.h"

#include <algorithm>
#include <array>
#include <bit>
#include <numeric>
#include <utility>

namespace aioflagcx::engine {

namespace {

// Last address inside the range: unlike the end it cannot wrap to 0.
std::uint64_t last_address(const AddressRange& range) noexcept {
    return range.addr + (range.size - 1);
}

}  // namespace

AddressIndex::AddressIndex(std::vector<AddressRange> ranges)
    : ranges_(std::move(ranges)), alone_(ranges_.size(), true), order_(ranges_.size()) {
    std::iota(order_.begin(), order_.end(), std::size_t{0});
    std::sort(order_.begin(), order_.end(), [this](std::size_t a, std::size_t b) {
        return ranges_[a].addr != ranges_[b].addr ? ranges_[a].addr < ranges_[b].addr : a < b;
    });
    const std::size_t count = order_.size();
    leaves_ = std::bit_ceil(std::max<std::size_t>(count, 1));
    tree_.assign(2 * leaves_, 0);
    starts_.reserve(count);
    std::uint64_t reach = 0;   // furthest last address so far
    std::size_t furthest = 0;  // whose it is
    for (std::size_t i = 0; i < count; ++i) {
        const AddressRange& range = ranges_[order_[i]];
        starts_.push_back(range.addr);
        tree_[leaves_ + i] = last_address(range);
        if (i > 0 && range.addr <= reach) {
            alone_[order_[i]] = false;
            alone_[furthest] = false;
        }
        if (i == 0 || last_address(range) > reach) {
            reach = last_address(range);
            furthest = order_[i];
        }
    }
    for (std::size_t i = leaves_ - 1; i > 0; --i) {
        tree_[i] = std::max(tree_[2 * i], tree_[2 * i + 1]);
    }
}

bool AddressIndex::holds(std::size_t range, std::uint64_t addr, std::uint64_t length,
                         std::uint32_t access) const noexcept {
    const AddressRange& r = ranges_[range];
    return addr >= r.addr && addr - r.addr <= r.size && length <= r.size - (addr - r.addr) &&
           (r.access & access) == access;
}

std::size_t AddressIndex::find(std::uint64_t addr, std::uint64_t length, std::uint32_t access,
                               std::size_t hint) const noexcept {
    if (hint != kNone && alone_[hint] && holds(hint, addr, length, access)) return hint;
    if (length == 0 || addr + (length - 1) < addr) return kNone;
    const std::uint64_t last = addr + (length - 1);
    const auto bound = static_cast<std::size_t>(
        std::upper_bound(starts_.begin(), starts_.end(), addr) - starts_.begin());
    // Leaves [0, bound) start at or before addr; descend only where some range reaches `last`.
    std::size_t best = kNone;
    std::array<std::pair<std::size_t, std::size_t>, 128> stack;  // (node, its first leaf)
    std::size_t depth = 0;
    stack[depth++] = {1, 0};
    while (depth > 0) {
        const auto [node, first] = stack[--depth];
        if (first >= bound || tree_[node] < last) continue;
        if (node >= leaves_) {
            const std::size_t candidate = order_[node - leaves_];
            if (holds(candidate, addr, length, access) &&
                (best == kNone || ranges_[candidate].size < ranges_[best].size)) {
                best = candidate;
            }
            continue;
        }
        const std::size_t half = leaves_ >> std::bit_width(node);  // leaves under each child
        stack[depth++] = {2 * node, first};
        stack[depth++] = {2 * node + 1, first + half};
    }
    return best;
}

}  // namespace aioflagcx::engine
