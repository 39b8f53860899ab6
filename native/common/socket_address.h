// Numeric IPv4 and IPv6 socket addresses.
#pragma once

#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <string>

#include "common/unique_fd.h"

namespace aioflagcx {

struct SocketAddress {
    sockaddr_storage storage{};
    socklen_t length = 0;

    const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&storage); }
    int family() const noexcept { return storage.ss_family; }

    // Throws NativeError when `host` is no numeric address ("fe80::1%eth0" is one).
    static SocketAddress numeric(const std::string& host, std::uint16_t port);
};

// A non-blocking listener on an ephemeral port of `host`; `port` is the one it got.
UniqueFd listen_on(const std::string& host, std::uint16_t* port);

}  // namespace aioflagcx
