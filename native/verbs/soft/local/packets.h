// Sending and receiving the messages of a local connection, with descriptors.
#pragma once

#include <sys/socket.h>
#include <sys/un.h>

#include <array>
#include <cstddef>
#include <span>

#include "common/unique_fd.h"
#include "verbs/soft/local/wire.h"

namespace aioflagcx::verbs::soft::local {

inline constexpr std::size_t kMaxDescriptors = 3;

// The address of the device whose listener has this name: an abstract one (unix(7)), so it is
// found in the same network namespace and goes with the listener.
struct ListenerAddress {
    explicit ListenerAddress(const Token& name);

    const sockaddr* get() const noexcept { return reinterpret_cast<const sockaddr*>(&address); }

    sockaddr_un address{};
    socklen_t length = 0;
};

UniqueFd open_packet_socket();  // non-blocking, close-on-exec; throws NativeError

// False, with errno, when it was not sent. Never waits.
bool send_message(int fd, const Message& message, std::span<const int> descriptors) noexcept;

enum class Received { Message, Nothing, Ended };
// Takes one message that is well-formed; anything else counts as the end. Never waits.
Received receive_message(int fd, Message& message,
                         std::array<UniqueFd, kMaxDescriptors>& descriptors) noexcept;

}  // namespace aioflagcx::verbs::soft::local
