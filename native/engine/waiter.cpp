#include "engine/waiter.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <climits>
#include <ctime>

namespace aioflagcx::engine {

namespace {

long futex(std::atomic<std::uint32_t>& word, int op, std::uint32_t value,
           const timespec* timeout) noexcept {
    static_assert(sizeof(word) == sizeof(std::uint32_t));
    return ::syscall(SYS_futex, &word, op | FUTEX_PRIVATE_FLAG, value, timeout, nullptr,
                     FUTEX_BITSET_MATCH_ANY);
}

// futex(2) counts CLOCK_MONOTONIC, as steady_clock does.
timespec to_timespec(verbs::Deadline deadline) noexcept {
    const auto since = deadline.time_since_epoch();
    const auto seconds = std::chrono::floor<std::chrono::seconds>(since);
    return {static_cast<time_t>(seconds.count()),
            static_cast<long>(std::chrono::nanoseconds(since - seconds).count())};
}

}  // namespace

void Waiter::open() noexcept {
    if (gate_.exchange(kOpen, std::memory_order_acq_rel) == kSleeping) {
        futex(gate_, FUTEX_WAKE_BITSET, INT_MAX, nullptr);
    }
}

bool Waiter::wait(verbs::Deadline deadline) noexcept {
    const timespec until = to_timespec(deadline);
    for (;;) {
        std::uint32_t seen = kShut;
        if (!gate_.compare_exchange_strong(seen, kSleeping, std::memory_order_acquire) &&
            seen == kOpen) {
            return true;
        }
        if (verbs::Clock::now() >= deadline) return false;
        // Woken, timed out or interrupted: the gate tells which matters.
        const bool interrupted =
            futex(gate_, FUTEX_WAIT_BITSET, kSleeping, &until) != 0 && errno == EINTR;
        if (interrupted) return is_open();
    }
}

}  // namespace aioflagcx::engine
