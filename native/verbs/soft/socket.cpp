#include "verbs/soft/socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

UniqueFd open_socket(int family) {
    UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw NativeError("socket", errno, "");
    return fd;
}

void set_no_delay(int fd) noexcept {
    const int on = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
}

void wait_for(int fd, short events, Deadline deadline) {
    while (true) {
        int timeout = -1;
        if (deadline != Deadline::max()) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(deadline - Clock::now());
            // A later deadline than poll(2) can wait for only makes it look again.
            timeout = static_cast<int>(std::clamp<std::int64_t>(left.count(), 0, 1 << 30));
        }
        pollfd entry{fd, events, 0};
        const int ready = ::poll(&entry, 1, timeout);
        if (ready > 0) return;
        if (ready < 0 && errno != EINTR) throw NativeError("poll", errno, "");
        if (deadline != Deadline::max() && Clock::now() >= deadline) {
            throw NativeError("connect", ETIMEDOUT, "");
        }
    }
}

ssize_t send_pieces(int fd, std::span<iovec> pieces) noexcept {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    ssize_t sent = 0;
    do {
        sent = ::sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent;
}

ssize_t receive_pieces(int fd, std::span<iovec> pieces) noexcept {
    msghdr message{};
    message.msg_iov = pieces.data();
    message.msg_iovlen = pieces.size();
    ssize_t got = 0;
    do {
        got = ::recvmsg(fd, &message, MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    return got;
}

void reset_connection(int fd) noexcept {
    sockaddr nowhere{};
    nowhere.sa_family = AF_UNSPEC;  // as connect(2) has it, for TCP
    if (::connect(fd, &nowhere, sizeof nowhere) != 0) ::shutdown(fd, SHUT_RDWR);
}

ssize_t discard_bytes(int fd, std::size_t size) noexcept {
    std::array<std::uint8_t, 16384> unread;
    ssize_t got = 0;
    do {
        got = ::recv(fd, unread.data(), std::min(size, unread.size()), MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    return got;
}

}  // namespace aioflagcx::verbs::soft
