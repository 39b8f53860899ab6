#include "verbs/soft/local/packets.h"

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <string>

#include "common/error.h"

namespace aioflagcx::verbs::soft::local {

namespace {

// As large as CMSG_SPACE() of all descriptors, and aligned for cmsghdr.
struct alignas(cmsghdr) Ancillary {
    std::array<char, CMSG_SPACE(sizeof(int) * kMaxDescriptors)> bytes{};
};

}  // namespace

ListenerAddress::ListenerAddress(const Token& name) {
    static constexpr char kDigits[] = "0123456789abcdef";
    std::string text(1, '\0');  // abstract
    text += "aioflagcx-";
    for (const std::uint8_t byte : name) {
        text += kDigits[byte >> 4];
        text += kDigits[byte & 15];
    }
    address.sun_family = AF_UNIX;
    std::copy(text.begin(), text.end(), address.sun_path);
    length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + text.size());
}

UniqueFd open_packet_socket() {
    UniqueFd fd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
    if (!fd) throw NativeError("socket", errno, "");
    return fd;
}

bool send_message(int fd, const Message& message, std::span<const int> descriptors) noexcept {
    iovec piece{const_cast<Message*>(&message), sizeof message};
    Ancillary ancillary;
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    if (!descriptors.empty()) {
        header.msg_control = ancillary.bytes.data();
        header.msg_controllen = CMSG_SPACE(descriptors.size_bytes());
        cmsghdr* const control = CMSG_FIRSTHDR(&header);
        control->cmsg_level = SOL_SOCKET;
        control->cmsg_type = SCM_RIGHTS;
        control->cmsg_len = CMSG_LEN(descriptors.size_bytes());
        std::memcpy(CMSG_DATA(control), descriptors.data(), descriptors.size_bytes());
    }
    ssize_t sent = 0;
    do {
        sent = ::sendmsg(fd, &header, MSG_NOSIGNAL | MSG_DONTWAIT);
    } while (sent < 0 && errno == EINTR);
    return sent == static_cast<ssize_t>(sizeof message);
}

Received receive_message(int fd, Message& message,
                         std::array<UniqueFd, kMaxDescriptors>& descriptors) noexcept {
    iovec piece{&message, sizeof message};
    Ancillary ancillary;
    msghdr header{};
    header.msg_iov = &piece;
    header.msg_iovlen = 1;
    header.msg_control = ancillary.bytes.data();
    header.msg_controllen = ancillary.bytes.size();
    ssize_t got = 0;
    do {
        got = ::recvmsg(fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    } while (got < 0 && errno == EINTR);
    if (got < 0) return errno == EAGAIN ? Received::Nothing : Received::Ended;
    // First of all, so that no descriptor stays open whatever else is wrong.
    std::size_t count = 0;
    for (cmsghdr* control = CMSG_FIRSTHDR(&header); control != nullptr;
         control = CMSG_NXTHDR(&header, control)) {
        if (control->cmsg_level != SOL_SOCKET || control->cmsg_type != SCM_RIGHTS) continue;
        const std::size_t size = control->cmsg_len - CMSG_LEN(0);
        for (std::size_t i = 0; i + sizeof(int) <= size; i += sizeof(int)) {
            int descriptor = -1;
            std::memcpy(&descriptor, CMSG_DATA(control) + i, sizeof descriptor);
            UniqueFd owned(descriptor);
            if (count < kMaxDescriptors) descriptors[count++] = std::move(owned);
        }
    }
    const bool whole = got == static_cast<ssize_t>(sizeof message) &&
                       (header.msg_flags & (MSG_TRUNC | MSG_CTRUNC)) == 0 &&
                       message.magic == kMagic && message.version == kWireVersion;
    return whole ? Received::Message : Received::Ended;
}

}  // namespace aioflagcx::verbs::soft::local
