// Restartable sequences (rseq(2)) of the calling thread, on x86-64 with a C library that registers
// threads (glibc 2.35) on a kernel that takes it (Linux 4.18).
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(__x86_64__) && __has_include(<sys/rseq.h>)
#include <sys/rseq.h>
#define AIOFLAGCX_RSEQ 1
#else
#define AIOFLAGCX_RSEQ 0
#endif

#if AIOFLAGCX_RSEQ

namespace aioflagcx::verbs::soft {

// This thread's, as the C library registered it; or null.
inline struct rseq* own_rseq() noexcept {
    if (__rseq_size == 0) return nullptr;
    auto* const own = reinterpret_cast<struct rseq*>(
        static_cast<char*>(__builtin_thread_pointer()) + __rseq_offset);
    // Negative: the kernel did not take it.
    return static_cast<std::int32_t>(own->cpu_id) < 0 ? nullptr : own;
}

// What the sequences in assembly rely on.
static_assert(offsetof(struct rseq, rseq_cs) == 8);
static_assert(RSEQ_SIG == 0x53053053);

// From here on the kernel takes this back when it stops or preempts the thread outside `sequence`.
inline void announce(struct rseq* own, const void* sequence) noexcept {
    const auto address = reinterpret_cast<std::uint64_t>(sequence);
    reinterpret_cast<volatile std::uint64_t*>(own)[1] = address;
    asm volatile("" ::: "memory");
}

}  // namespace aioflagcx::verbs::soft

#endif
