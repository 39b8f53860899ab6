#include "verbs/soft/local/guarded_copy.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>

#include "verbs/soft/limits.h"
#include "verbs/soft/own_rseq.h"

namespace aioflagcx::verbs::soft::local {

#if AIOFLAGCX_RSEQ

namespace {

constexpr long kChanged = LONG_MIN;      // the word is not as expected
constexpr long kAborted = LONG_MIN + 1;  // stopped or preempted: look again

}  // namespace

// The sequences. Each is described to the kernel by a struct rseq_cs (linux/rseq.h): version and
// flags, where it starts, its length, and where to go on instead. That place must follow the
// signature that the C library registered, here as the operand of an instruction that traps.
extern "C" {
long aioflagcx_guarded_syscall(long number, long a1, const void* a2, long a3, const void* a4,
                               long a5, void* rseq, const void* word, std::uint64_t expected);
long aioflagcx_guarded_movs(void* to, const void* from, std::size_t size, void* rseq,
                            const void* word, std::uint64_t expected);
}

__asm__(R"(
    .pushsection __rseq_cs, "aw"
    .balign 32
.Laioflagcx_syscall_cs:
    .long 0, 0
    .quad 1f, 2f - 1f, 4f
    .popsection

    .pushsection .text
    .type aioflagcx_guarded_syscall, @function
    .globl aioflagcx_guarded_syscall
    .hidden aioflagcx_guarded_syscall
aioflagcx_guarded_syscall:
    .cfi_startproc
    movq %rdi, %rax
    movq %rsi, %rdi
    movq %rdx, %rsi
    movq %rcx, %rdx
    movq %r8, %r10
    movq %r9, %r8
    xorl %r9d, %r9d
    movq 8(%rsp), %r11
    leaq .Laioflagcx_syscall_cs(%rip), %rcx
    movq %rcx, 8(%r11)
    movq 16(%rsp), %rcx
1:
    movq (%rcx), %rcx
    cmpq 24(%rsp), %rcx
    jne 3f
    syscall
2:
    ret
3:
    movabsq $0x8000000000000000, %rax
    ret
    .byte 0x0f, 0xb9, 0x3d
    .long 0x53053053
4:
    movabsq $0x8000000000000001, %rax
    ret
    .cfi_endproc
    .size aioflagcx_guarded_syscall, . - aioflagcx_guarded_syscall
    .popsection

    .pushsection __rseq_cs, "aw"
    .balign 32
.Laioflagcx_movs_cs:
    .long 0, 0
    .quad 1f, 2f - 1f, 4f
    .popsection

    .pushsection .text
    .type aioflagcx_guarded_movs, @function
    .globl aioflagcx_guarded_movs
    .hidden aioflagcx_guarded_movs
aioflagcx_guarded_movs:
    .cfi_startproc
    leaq .Laioflagcx_movs_cs(%rip), %rax
    movq %rax, 8(%rcx)
    movq %rdx, %rcx
1:
    movq (%r8), %rax
    cmpq %r9, %rax
    jne 3f
    rep movsb
2:
    xorl %eax, %eax
    ret
3:
    movabsq $0x8000000000000000, %rax
    ret
    .byte 0x0f, 0xb9, 0x3d
    .long 0x53053053
4:
    movabsq $0x8000000000000001, %rax
    ret
    .cfi_endproc
    .size aioflagcx_guarded_movs, . - aioflagcx_guarded_movs
    .popsection
)");

bool copies_are_guarded() noexcept { return own_rseq() != nullptr; }

#else

bool copies_are_guarded() noexcept { return false; }

#endif

bool guarded_call(const Guard& guard, bool reading, pid_t pid, std::span<const iovec> here,
                  std::span<const iovec> there, ssize_t* result) noexcept {
    const long number = reading ? SYS_process_vm_readv : SYS_process_vm_writev;
#if AIOFLAGCX_RSEQ
    if (struct rseq* const own = own_rseq()) {
        long got = kAborted;
        while (got == kAborted) {
            got = aioflagcx_guarded_syscall(
                number, pid, here.data(), static_cast<long>(here.size()), there.data(),
                static_cast<long>(there.size()), own, guard.word, guard.expected);
        }
        if (got == kChanged) return false;
        if (got < 0) errno = static_cast<int>(-got);
        *result = got < 0 ? -1 : got;
        return true;
    }
#endif
    if (guard.word->load(std::memory_order_seq_cst) != guard.expected) return false;
    *result = ::syscall(number, pid, here.data(), here.size(), there.data(), there.size(), 0);
    return true;
}

bool guarded_copy(const Guard& guard, void* to, const void* from, std::size_t size) noexcept {
#if AIOFLAGCX_RSEQ
    struct rseq* const own = own_rseq();
    const auto target = reinterpret_cast<std::uintptr_t>(to);
    const auto source = reinterpret_cast<std::uintptr_t>(from);
    const bool overlap = target < source + size && source < target + size;
    // In steps that are over long before the scheduler's turn, as one that is not is begun again.
    if (own != nullptr && !overlap) {
        for (std::size_t done = 0; done < size;) {
            const std::size_t step = std::min(size - done, kGuardedBytes);
            const long got = aioflagcx_guarded_movs(static_cast<char*>(to) + done,
                                                    static_cast<const char*>(from) + done, step,
                                                    own, guard.word, guard.expected);
            if (got == kChanged) return false;
            if (got != kAborted) done += step;
        }
        return true;
    }
#endif
    if (guard.word->load(std::memory_order_seq_cst) != guard.expected) return false;
    std::memmove(to, from, size);
    return true;
}

}  // namespace aioflagcx::verbs::soft::local
