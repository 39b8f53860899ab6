#include "common/socket_address.h"

#include <netdb.h>

#include <cerrno>
#include <cstring>

#include "common/error.h"

namespace aioflagcx {

SocketAddress SocketAddress::numeric(const std::string& host, std::uint16_t port) {
    addrinfo hints{};
    hints.ai_flags = AI_NUMERICHOST | AI_NUMERICSERV;
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (::getaddrinfo(host.c_str(), std::to_string(port).c_str(), &hints, &found) != 0) {
        throw NativeError("address", EINVAL, "'" + host + "' is no numeric IPv4 or IPv6 address");
    }
    SocketAddress address;
    std::memcpy(&address.storage, found->ai_addr, found->ai_addrlen);
    address.length = found->ai_addrlen;
    ::freeaddrinfo(found);
    return address;
}

UniqueFd listen_on(const std::string& host, std::uint16_t* port) {
    const SocketAddress address = SocketAddress::numeric(host, 0);
    UniqueFd fd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw NativeError("socket", errno, host);
    if (::bind(fd.get(), address.get(), address.length) != 0) {
        throw NativeError("bind", errno, host);
    }
    if (::listen(fd.get(), SOMAXCONN) != 0) throw NativeError("listen", errno, host);
    sockaddr_storage bound{};
    socklen_t length = sizeof bound;
    ::getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &length);
    *port =
        ntohs(bound.ss_family == AF_INET6 ? reinterpret_cast<const sockaddr_in6*>(&bound)->sin6_port
                                          : reinterpret_cast<const sockaddr_in*>(&bound)->sin_port);
    return fd;
}

}  // namespace aioflagcx
