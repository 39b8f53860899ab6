// What both ends of the local path map: plain words in sealed memory files. Everything is a
// lock-free atomic, since two processes read and write it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft::local {

static_assert(std::atomic<std::uint64_t>::is_always_lock_free &&
              std::atomic<std::uint32_t>::is_always_lock_free);

// One MR as peers see it. The owner writes the other members before `tag`, and changes them only
// when no announcement holds the key.
struct Entry {
    std::atomic<std::uint64_t> tag;  // open_tag(key), or 0
    std::atomic<std::uint64_t> addr;
    std::atomic<std::uint64_t> length;
    std::atomic<std::uint32_t> access;
    std::atomic<std::uint32_t> mappable;  // 1: backed by a file that a peer may ask for
};
static_assert(sizeof(Entry) == 32);

inline std::uint64_t open_tag(std::uint32_t key) noexcept { return (std::uint64_t{1} << 32) | key; }

// Written by the target, mapped read-only by its initiators.
struct Table {
    // Counts gates closed and entries taken away, each after it was: see guarded_copy.h.
    alignas(64) std::atomic<std::uint64_t> revocations;
    std::array<std::atomic<std::uint32_t>, kLocalGates> gates;  // by QP: its ticket, or 0: closed
    std::array<Entry, kLocalRegions> entries;                   // by slot_of(key)
};

// Written by one initiator QP, read by its target: the keys it is about to use or using. `count`
// is stored last and cleared first.
struct Announcement {
    std::atomic<std::uint32_t> count;
    // Who copies, if a copy of it ends when it is stopped; else 0. Stored before `count`.
    std::atomic<std::uint32_t> thread;
    std::array<std::atomic<std::uint32_t>, kAnnouncedKeys> keys;
};

// Keys are counts times an odd number, so that neighbouring counts give keys far apart and a
// mistyped key is not its neighbour's; dividing again gives neighbours neighbouring entries.
inline constexpr std::uint32_t kKeySpread = 0x9E3779B1;

constexpr std::uint32_t inverse_of(std::uint32_t odd) noexcept {
    std::uint32_t inverse = odd;  // right in the lowest 3 bits; each step doubles them (Newton)
    for (int i = 0; i < 4; ++i) inverse *= 2U - odd * inverse;
    return inverse;
}
static_assert(inverse_of(kKeySpread) * kKeySpread == 1);

constexpr std::size_t slot_of(std::uint32_t key) noexcept {
    return key * inverse_of(kKeySpread) % kLocalRegions;
}

}  // namespace aioflagcx::verbs::soft::local
