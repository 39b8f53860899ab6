#include "verbs/soft/guarded_receive.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <cerrno>
#include <climits>
#include <cstddef>

#include "verbs/soft/own_rseq.h"
#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft {

namespace {

// Whether the peer has reset or shut down the stream, whatever of it is still unread.
bool given_up(int fd) noexcept {
    pollfd entry{fd, POLLRDHUP, 0};
    int ready = 0;
    do {
        ready = ::poll(&entry, 1, 0);
    } while (ready < 0 && errno == EINTR);
    return ready > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0;
}

ssize_t refused() noexcept {
    errno = ECONNRESET;
    return -1;
}

}  // namespace

#if AIOFLAGCX_RSEQ

namespace {

constexpr long kAborted = LONG_MIN + 1;  // stopped or preempted since it was begun

// Of times a look is repeated because the thread was preempted right after it: rare, so that this
// many in a row mean a kernel that has other reasons, and the guard is done without.
constexpr int kTries = 64;

}  // namespace

// The sequence ends with recvmsg(2). It is announced in `rseq` before the look; when the thread is
// stopped or preempted between there and the sequence, the kernel takes the announcement back.
extern "C" {
extern const char aioflagcx_receive_cs[];
long aioflagcx_guarded_recvmsg(long number, long fd, msghdr* message, long flags, void* rseq);
}

__asm__(R"(
    .pushsection __rseq_cs, "aw"
    .balign 32
    .globl aioflagcx_receive_cs
    .hidden aioflagcx_receive_cs
aioflagcx_receive_cs:
    .long 0, 0
    .quad 1f, 2f - 1f, 4f
    .popsection

    .pushsection .text
    .type aioflagcx_guarded_recvmsg, @function
    .globl aioflagcx_guarded_recvmsg
    .hidden aioflagcx_guarded_recvmsg
aioflagcx_guarded_recvmsg:
    .cfi_startproc
    movq %rdi, %rax
    movq %rsi, %rdi
    movq %rdx, %rsi
    movq %rcx, %rdx
1:
    cmpq $0, 8(%r8)
    je 3f
    syscall
2:
    ret
    .byte 0x0f, 0xb9, 0x3d
    .long 0x53053053
4:
3:
    movabsq $0x8000000000000001, %rax
    ret
    .cfi_endproc
    .size aioflagcx_guarded_recvmsg, . - aioflagcx_guarded_recvmsg
    .popsection
)");

ssize_t receive_wanted(int fd, std::span<iovec> pieces) noexcept {
    struct rseq* const own = own_rseq();
    if (own != nullptr) {
        msghdr message{};
        message.msg_iov = pieces.data();
        message.msg_iovlen = pieces.size();
        for (int i = 0; i < kTries; ++i) {
            announce(own, aioflagcx_receive_cs);
            if (given_up(fd)) return refused();
            const long got =
                aioflagcx_guarded_recvmsg(SYS_recvmsg, fd, &message, MSG_DONTWAIT, own);
            if (got == kAborted || got == -EINTR) continue;
            if (got >= 0) return got;
            errno = static_cast<int>(-got);
            return -1;
        }
    }
    return given_up(fd) ? refused() : receive_pieces(fd, pieces);
}

#else

ssize_t receive_wanted(int fd, std::span<iovec> pieces) noexcept {
    return given_up(fd) ? refused() : receive_pieces(fd, pieces);
}

#endif

}  // namespace aioflagcx::verbs::soft
