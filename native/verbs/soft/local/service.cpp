#include "verbs/soft/local/service.h"

#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <utility>

#include "common/error.h"
#include "verbs/soft/local/wire.h"

namespace aioflagcx::verbs::soft::local {

namespace {

// What an initiator reads through the kernel to prove that it may. In this process for good.
const Token& process_nonce() {
    static const Token nonce = random_token();
    return nonce;
}

void refuse(int fd, const std::string& why) {
    Message message;
    message.kind = Kind::Refused;
    const std::size_t size = std::min(why.size(), message.reason.size() - 1);
    std::copy_n(why.begin(), size, message.reason.begin());
    send_message(fd, message, {});
}

// The process at the other end, or no descriptor and the reason why it is not let in.
UniqueFd open_process(int connection, pid_t* pid, std::string* why) {
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(connection, SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
        *why = "it cannot tell who connects to it (SO_PEERCRED)";
        return {};
    }
    if (peer.pid == 0) {
        *why = "it is in a PID namespace that this process is not in";
        return {};
    }
    if (peer.uid != ::geteuid()) {
        *why = "it runs as another user than this process";
        return {};
    }
    UniqueFd process(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
    if (!process) *why = "it cannot watch this process (pidfd_open)";
    *pid = peer.pid;
    return process;
}

void send_offered(int connection) {
    Message message;
    message.kind = Kind::Offered;
    message.nonce = process_nonce();
    message.nonce_addr = reinterpret_cast<std::uint64_t>(process_nonce().data());
    message.regions = kLocalRegions;
    message.gates = kLocalGates;
    message.keys = kAnnouncedKeys;
    send_message(connection, message, {});
}

bool send_opened(const LocalGuest& guest, int stream) {
    Message message;
    message.kind = Kind::Opened;
    message.target = guest.table().name();
    message.pid = guest.pid();
    message.gate = guest.gate();
    message.ticket = guest.ticket();
    const int files[] = {guest.table().fd(), guest.page_fd(), stream};
    return send_message(guest.control_fd(), message, files);
}

void answer_lend(Responder& responder, LocalGuest& guest, std::uint32_t key) {
    Message message;
    message.kind = Kind::Lent;
    message.key = key;
    const MrRef entry = responder.mrs()->find(key);
    // Pinned, since its file may be closed as soon as the region is gone.
    PinSet pins;
    if (!entry || entry->shared.fd < 0 || !pins.add(entry)) {
        send_message(guest.control_fd(), message, {});
        return;
    }
    message.offset = entry->shared.offset;
    UniqueFd read_only;
    int file = entry->shared.fd;
    if ((entry->access & kAccessRemoteWrite) == 0) {
        try {
            read_only = reopen_read_only(file);
        } catch (const NativeError&) {  // without /proc, say
            send_message(guest.control_fd(), message, {});
            return;
        }
        file = read_only.get();
    }
    guest.lend(key);  // first: a recall after this finds it
    send_message(guest.control_fd(), message, {&file, 1});
}

}  // namespace

Listener::Listener() : name_(random_token()), fd_(open_packet_socket()) {
    const ListenerAddress address(name_);
    if (::bind(fd_.get(), address.get(), address.length) != 0) {
        throw NativeError("bind", errno, "the local path's Unix socket");
    }
    if (::listen(fd_.get(), SOMAXCONN) != 0) {
        throw NativeError("listen", errno, "the local path's Unix socket");
    }
}

Answer answer_stranger(UniqueFd& connection, const Registry& exposed) {
    Message message;
    std::array<UniqueFd, kMaxDescriptors> unexpected;
    const Received received = receive_message(connection.get(), message, unexpected);
    if (received == Received::Nothing) return {.more = true};
    if (received == Received::Ended) return {};
    if (message.kind != Kind::Open && message.kind != Kind::Enter) return {};
    std::shared_ptr<Responder> responder = exposed.find(message.target);
    SharedTable* const table = responder ? responder->mrs()->shared() : nullptr;
    if (table == nullptr) return {};
    pid_t pid = 0;
    std::string why;
    UniqueFd process = open_process(connection.get(), &pid, &why);
    if (!process) {
        refuse(connection.get(), why);
        return {};
    }
    if (message.kind == Kind::Open) {
        send_offered(connection.get());
        return {.more = true};
    }
    int ends[2] = {-1, -1};
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
        refuse(connection.get(), "it is out of file descriptors");
        return {};
    }
    UniqueFd ours(ends[0]);
    const UniqueFd theirs(ends[1]);
    if (!responder->claim(message.initiator)) return {};
    std::shared_ptr<LocalGuest> guest;
    try {
        guest = table->admit(connection, std::move(process), pid);
    } catch (const NativeError& error) {
        refuse(connection.get(), error.detail());
        return {};
    }
    if (!responder->attach(guest) || !send_opened(*guest, theirs.get())) {
        guest->close();
        return {};
    }
    return {.responder = std::move(responder), .stream = std::move(ours)};
}

bool answer_guest(Responder& responder, LocalGuest& guest) {
    for (int i = 0; i < kMessagesPerTurn; ++i) {
        Message message;
        std::array<UniqueFd, kMaxDescriptors> unexpected;
        switch (receive_message(guest.control_fd(), message, unexpected)) {
            case Received::Nothing:
                return true;
            case Received::Ended:
                return false;
            case Received::Message:
                break;
        }
        if (message.kind != Kind::Lend) return false;
        answer_lend(responder, guest, message.key);
    }
    return true;
}

}  // namespace aioflagcx::verbs::soft::local
