#include "verbs/soft/tcp_connect.h"

#include <poll.h>

#include <cerrno>

#include "common/error.h"
#include "verbs/soft/socket.h"
#include "verbs/soft/wire.h"

namespace aioflagcx::verbs::soft {

namespace {

void finish_connecting(int fd, Deadline deadline) {
    wait_for(fd, POLLOUT, deadline);
    int error = 0;
    socklen_t size = sizeof error;
    if (::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size) != 0) error = errno;
    if (error != 0) throw NativeError("connect", error, "");
}

void send_hello(int fd, std::uint16_t stream, const Token& token) {
    wire::Hello hello{wire::kHelloMagic, wire::kVersion, stream, token};
    iovec piece{&hello, sizeof hello};
    // A fresh socket's buffer takes these few bytes at once.
    const ssize_t sent = send_pieces(fd, {&piece, 1});
    if (sent != sizeof hello) throw NativeError("send", sent < 0 ? errno : EIO, "hello");
}

void await_reply(int fd, std::uint16_t stream, Deadline deadline) {
    wire::HelloReply reply{};
    auto* bytes = reinterpret_cast<std::uint8_t*>(&reply);
    std::size_t have = 0;
    while (have < sizeof reply) {
        wait_for(fd, POLLIN, deadline);
        iovec piece{bytes + have, sizeof reply - have};
        const ssize_t got = receive_pieces(fd, {&piece, 1});
        if (got == 0 || (got < 0 && errno == ECONNRESET)) {
            throw NativeError("connect", ECONNREFUSED, "the peer's QP does not know this one");
        }
        if (got < 0 && errno != EAGAIN) throw NativeError("recv", errno, "hello");
        if (got > 0) have += static_cast<std::size_t>(got);
    }
    if (reply.magic != wire::kHelloMagic || reply.version != wire::kVersion ||
        reply.stream != stream) {
        throw NativeError("connect", EPROTO, "the peer's answer is not the soft device's");
    }
}

}  // namespace

std::vector<UniqueFd> open_streams(const SocketAddress& address, const Token& token,
                                   std::uint32_t count, Deadline deadline) {
    // Step by step for all streams, so that they share the network's round trips.
    std::vector<UniqueFd> streams;
    for (std::uint32_t i = 0; i < count; ++i) {
        streams.push_back(open_socket(address.family()));
        const int fd = streams.back().get();
        set_no_delay(fd);
        if (::connect(fd, address.get(), address.length) != 0 && errno != EINPROGRESS) {
            throw NativeError("connect", errno, "");
        }
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        finish_connecting(streams[i].get(), deadline);
        send_hello(streams[i].get(), static_cast<std::uint16_t>(i), token);
    }
    for (std::uint32_t i = 0; i < count; ++i) {
        await_reply(streams[i].get(), static_cast<std::uint16_t>(i), deadline);
    }
    return streams;
}

}  // namespace aioflagcx::verbs::soft
