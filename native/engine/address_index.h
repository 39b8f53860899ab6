// Finds, among possibly overlapping ranges, the smallest that holds a piece.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace aioflagcx::engine {

struct AddressRange {
    std::uint64_t addr = 0;
    std::uint64_t size = 0;    // addr + size does not pass 2^64
    std::uint32_t access = 0;  // what a lookup may require of this range
};

// Immutable once built. A lookup costs O(log n) plus O(log n) for each range that overlaps the
// piece's first byte, by a segment tree of range ends over the ranges sorted by address.
class AddressIndex {
  public:
    static constexpr std::size_t kNone = SIZE_MAX;

    AddressIndex() = default;
    explicit AddressIndex(std::vector<AddressRange> ranges);

    // Position, in the vector given, of the smallest range that holds [addr, addr + length) and
    // has every bit of `access`; kNone when there is none. `hint` is the answer to an earlier
    // lookup or kNone: neighbouring pieces mostly share a range, and a range that overlaps no
    // other is the only possible answer.
    std::size_t find(std::uint64_t addr, std::uint64_t length, std::uint32_t access,
                     std::size_t hint = kNone) const noexcept;

    std::size_t size() const noexcept { return ranges_.size(); }

    // The n-th range in address order, as a position in the vector given.
    std::size_t by_address(std::size_t n) const noexcept { return order_[n]; }

  private:
    bool holds(std::size_t range, std::uint64_t addr, std::uint64_t length,
               std::uint32_t access) const noexcept;

    std::vector<AddressRange> ranges_;
    std::vector<bool> alone_;            // by position: overlaps no other range
    std::vector<std::size_t> order_;     // positions sorted by address
    std::vector<std::uint64_t> starts_;  // addresses in that order
    std::vector<std::uint64_t> tree_;    // maximum of last addresses; leaves from leaves_ on
    std::size_t leaves_ = 0;
};

}  // namespace aioflagcx::engine
