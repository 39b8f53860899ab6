// Counters and gauges of one engine; relaxed atomics, read at any time.
#pragma once

#include <atomic>
#include <cstdint>

namespace aioflagcx::engine {

struct Stats {
    std::atomic<std::uint64_t> bytes_written{0};
    std::atomic<std::uint64_t> bytes_read{0};
    std::atomic<std::uint64_t> slices_posted{0};
    std::atomic<std::uint64_t> slices_reposted{0};
    std::atomic<std::uint64_t> transfers_submitted{0};
    std::atomic<std::uint64_t> transfers_done{0};
    std::atomic<std::uint64_t> transfers_failed{0};
    std::atomic<std::uint64_t> transfers_inflight{0};
    std::atomic<std::uint64_t> bytes_inflight{0};
    std::atomic<std::uint64_t> sessions{0};
    std::atomic<std::uint64_t> responders{0};
    std::atomic<std::uint64_t> wakeups{0};  // of the event loop
    std::atomic<std::uint64_t> worker_sleeps{0};
    std::atomic<std::uint64_t> keepalive_wakeups{0};
    std::atomic<std::uint64_t> endpoints_failed{0};
};

inline void add(std::atomic<std::uint64_t>& counter, std::uint64_t n = 1) noexcept {
    counter.fetch_add(n, std::memory_order_relaxed);
}
inline void sub(std::atomic<std::uint64_t>& counter, std::uint64_t n = 1) noexcept {
    counter.fetch_sub(n, std::memory_order_relaxed);
}

}  // namespace aioflagcx::engine
