// Copies that a stopped thread does not go on with.
//
// A thread that has looked whether it may copy, and is stopped before it has (SIGSTOP), would copy
// when it is continued, however long after. These copies look at a word for the last
// time inside a restartable sequence (rseq(2)): when the thread is stopped or preempted between
// that look and the end of the sequence, the kernel does not let it go on there, but at a place
// that looks again. So once a thread is seen to be stopped, nothing that it checked before the word
// changed is ever copied. Who traces a thread can stop it inside a system call that has not begun
// to copy: that counts as not stopped.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

namespace aioflagcx::verbs::soft::local {

// Whether this thread's copies are like that: on x86-64, with a C library that registers threads
// (glibc 2.35) on a kernel that takes it (Linux 4.18). Elsewhere they are ordinary copies.
bool copies_are_guarded() noexcept;

// What must not have changed, and what it was.
struct Guard {
    const std::atomic<std::uint64_t>* word;
    std::uint64_t expected;
};

// As process_vm_writev(2), or process_vm_readv(2) if `reading`. False, and nothing is copied, when
// the word has changed. The kernel is not interrupted once it has begun.
bool guarded_call(const Guard& guard, bool reading, pid_t pid, std::span<const iovec> here,
                  std::span<const iovec> there, ssize_t* result) noexcept;

// As memmove(3). False when the word changed before the end; then a part may have been copied.
bool guarded_copy(const Guard& guard, void* to, const void* from, std::size_t size) noexcept;

}  // namespace aioflagcx::verbs::soft::local
