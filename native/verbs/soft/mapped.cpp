#include "verbs/soft/mapped.h"

#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

namespace {

// The futex calls read or change one word on our behalf and answer EFAULT where we would crash.
// Adding zero is atomic, so even a word that others write to meanwhile keeps its value.
bool accessible(std::uint64_t addr, bool writable) {
    auto* word = reinterpret_cast<std::uint32_t*>(addr & ~std::uint64_t{3});
    long result = 0;
    if (writable) {
        std::uint32_t own = 0;
        result = ::syscall(SYS_futex, &own, FUTEX_WAKE_OP_PRIVATE, 0, nullptr, word,
                           FUTEX_OP(FUTEX_OP_ADD, 0, FUTEX_OP_CMP_EQ, 0));
    } else {
        const timespec now{0, 0};  // equal or not, the wait returns at once
        result = ::syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, 0, &now, nullptr, 0);
    }
    return result >= 0 || errno != EFAULT;
}

}  // namespace

void require_mapped(std::uint64_t addr, std::uint64_t length, bool writable) {
    const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = addr & ~(page - 1);
    const std::uint64_t last = addr + (length - 1);
    const std::uint64_t size = (last & ~(page - 1)) - first + page;
    // MS_ASYNC writes nothing since Linux 2.6.19; it walks the mappings, not the pages, so 100 GB
    // take as long as 4 KiB.
    if (::msync(reinterpret_cast<void*>(first), size, MS_ASYNC) != 0) {
        throw NativeError("register_memory", EFAULT, "the range is not wholly mapped");
    }
    if (!accessible(addr, writable) || !accessible(last, writable)) {
        throw NativeError("register_memory", EFAULT,
                          writable ? "memory is not writable" : "memory is not readable");
    }
}

}  // namespace aioflagcx::verbs::soft
