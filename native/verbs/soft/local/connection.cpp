#include "verbs/soft/local/connection.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <fstream>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "verbs/soft/local/packets.h"
#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft::local {

namespace {

constexpr std::chrono::milliseconds kBacklogNap{5};

// Mappings of this process by the table's name and key, so that the queue pairs of a session share
// them. Never destroyed: threads may still use it while the process exits.
class SharedMappings {
  public:
    static SharedMappings& process() {
        static SharedMappings* const mappings = std::make_unique<SharedMappings>().release();
        return *mappings;
    }

    template <typename Make>
    std::shared_ptr<Mapping> get(const Token& table, std::uint32_t key, Make make) {
        const std::lock_guard lock(mutex_);
        std::erase_if(known_, [](const auto& item) { return item.second.expired(); });
        std::weak_ptr<Mapping>& known = known_[{table, key}];
        auto mapping = known.lock();
        if (!mapping) known = mapping = make();
        return mapping;
    }

  private:
    std::mutex mutex_;  // guards known_; a leaf
    std::map<std::pair<Token, std::uint32_t>, std::weak_ptr<Mapping>> known_;
};

std::string read_word(const char* path) {
    std::ifstream file(path);
    std::string word;
    file >> word;
    return word;
}

}  // namespace

std::string explain_refusal(const std::string& ptrace_scope) {
    if (ptrace_scope == "1") {
        return "Yama's ptrace_scope is 1, so only a parent may copy into its children's memory; "
               "allow_ptrace=True (AIOFLAGCX_ALLOW_PTRACE=1) at the peer permits it";
    }
    if (ptrace_scope == "2") {
        return "Yama's ptrace_scope is 2, so copying into another process takes CAP_SYS_PTRACE";
    }
    if (ptrace_scope == "3") {
        return "Yama's ptrace_scope is 3, which forbids copying into another process";
    }
    return "the kernel does not permit to copy into the peer: it is not dumpable "
           "(PR_SET_DUMPABLE), or has capabilities or a security policy that this process has not";
}

Connection::Connection(const Token& socket, const Token& responder, const Token& initiator,
                       Deadline deadline)
    : control_(open_packet_socket()) {
    open(socket, responder, initiator, deadline);
}

void Connection::open(const Token& socket, const Token& responder, const Token& initiator,
                      Deadline deadline) {
    const ListenerAddress address(socket);
    while (::connect(control_.get(), address.get(), address.length) != 0) {
        if (errno == EINTR) continue;
        if (errno != EAGAIN) {
            throw Unavailable("connect", errno,
                              "its Unix socket is not here, it is in another network namespace");
        }
        if (Clock::now() >= deadline) throw NativeError("connect", ETIMEDOUT, "");
        std::this_thread::sleep_for(kBacklogNap);
    }
    check_peer();
    Message message;
    message.target = responder;
    message.initiator = initiator;
    std::array<UniqueFd, kMaxDescriptors> files;
    message.kind = Kind::Open;
    const Message offered = ask(message, Kind::Offered, files, deadline);
    if (offered.regions != kLocalRegions || offered.gates != kLocalGates ||
        offered.keys != kAnnouncedKeys) {
        throw Unavailable("connect", EPROTO, "the peer's build shares memory in another way");
    }
    prove_permission(offered.nonce_addr, offered.nonce);
    message.kind = Kind::Enter;
    const Message opened = ask(message, Kind::Opened, files, deadline);
    if (!files[0] || !files[1] || !files[2] || opened.gate >= kLocalGates || opened.ticket == 0) {
        throw NativeError("connect", EPROTO, "the peer's answer on the local path makes no sense");
    }
    require_fixed_size(files[0].get(), sizeof(Table));
    require_fixed_size(files[1].get(), sizeof(Announcement));
    table_ = Mapping(files[0].get(), sizeof(Table), false);
    page_ = Mapping(files[1].get(), sizeof(Announcement), true);
    stream_ = std::move(files[2]);
    gate_ = opened.gate;
    ticket_ = opened.ticket;
    same_ids_ = opened.pid == ::getpid();
    table_name_ = opened.target;
}

Message Connection::ask(const Message& message, Kind expected,
                        std::array<UniqueFd, kMaxDescriptors>& files, Deadline deadline) {
    // Not sent since the peer has left: it may have said why.
    send_message(control_.get(), message, {});
    Message answer;
    Received received = Received::Nothing;
    while ((received = receive_message(control_.get(), answer, files)) == Received::Nothing) {
        wait_for(control_.get(), POLLIN, deadline);
    }
    if (received == Received::Ended) {
        throw NativeError("connect", ECONNREFUSED, "the peer's QP does not know this one");
    }
    if (answer.kind == Kind::Refused) {
        answer.reason.back() = '\0';
        throw Unavailable("connect", EACCES, answer.reason.data());
    }
    if (answer.kind != expected) {
        throw NativeError("connect", EPROTO, "the peer's answer on the local path makes no sense");
    }
    return answer;
}

void Connection::check_peer() {
    ucred peer{};
    socklen_t size = sizeof peer;
    if (::getsockopt(control_.get(), SOL_SOCKET, SO_PEERCRED, &peer, &size) != 0) {
        throw NativeError("getsockopt", errno, "SO_PEERCRED");
    }
    if (peer.pid == 0) {
        throw Unavailable("connect", ESRCH, "it is in another PID namespace");
    }
    if (peer.uid != ::geteuid()) {
        throw Unavailable("connect", EPERM,
                          "it runs as user " + std::to_string(peer.uid) + ", this process as " +
                              std::to_string(::geteuid()));
    }
    pid_ = peer.pid;
    process_ = UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
    if (!process_) {
        throw Unavailable("pidfd_open", errno, "process " + std::to_string(pid_));
    }
}

// Also that it is the process that opened the socket: a pid may have come to name another one.
void Connection::prove_permission(std::uint64_t nonce_addr, const Token& nonce) const {
    Token read{};
    const iovec here{read.data(), read.size()};
    const iovec there{reinterpret_cast<void*>(nonce_addr), read.size()};
    const ssize_t got = ::process_vm_readv(pid_, &here, 1, &there, 1, 0);
    if (got < 0 && errno == EPERM) {
        throw Unavailable("process_vm_readv", EPERM,
                          explain_refusal(read_word("/proc/sys/kernel/yama/ptrace_scope")));
    }
    if (got < 0) {
        throw Unavailable("process_vm_readv", errno, "process " + std::to_string(pid_));
    }
    if (read != nonce) {
        throw Unavailable("process_vm_readv", EACCES,
                          "process " + std::to_string(pid_) + " is not the peer");
    }
}

int Connection::loss() const noexcept {
    // Of the connection only POLLHUP, which is told unasked.
    pollfd entries[] = {{process_.get(), POLLIN, 0}, {control_.get(), 0, 0}};
    if (::poll(entries, 2, 0) <= 0) return 0;
    return entries[0].revents != 0 ? ESRCH : ECONNRESET;
}

std::uint8_t* Connection::find_mapped(std::uint32_t key) {
    const auto found = windows_.find(key);
    if (found != windows_.end()) return found->second.base;
    Message message;
    message.kind = Kind::Lend;
    message.key = key;
    // Not sent for want of room: the next use asks again.
    if (send_message(control_.get(), message, {})) windows_.emplace(key, Window{});
    return nullptr;
}

bool Connection::receive() {
    for (;;) {
        Message message;
        std::array<UniqueFd, kMaxDescriptors> files;
        switch (receive_message(control_.get(), message, files)) {
            case Received::Nothing:
                return true;
            case Received::Ended:
                return false;
            case Received::Message:
                break;
        }
        if (message.kind == Kind::Lent) {
            take_lent(message.key, message.offset, std::move(files[0]));
        } else if (message.kind == Kind::Recall) {
            windows_.erase(message.key);
        }
    }
}

void Connection::take_lent(std::uint32_t key, std::uint64_t offset, UniqueFd file) {
    const auto window = windows_.find(key);
    const Entry& entry = table().entries[slot_of(key)];
    const std::uint64_t length = entry.length.load(std::memory_order_relaxed);
    const bool writable = (entry.access.load(std::memory_order_relaxed) & kAccessRemoteWrite) != 0;
    if (window == windows_.end() || !file || offset > SIZE_MAX - length) return;
    // Still the same region, so what was read of it is its own.
    if (entry.tag.load(std::memory_order_seq_cst) != open_tag(key)) return;
    try {
        // All of it, as huge pages are unmapped as a whole only.
        const std::size_t size = require_fixed_size(file.get(), offset + length);
        window->second.mapping = SharedMappings::process().get(table_name_, key, [&] {
            return std::make_shared<Mapping>(file.get(), size, writable);
        });
        window->second.base = static_cast<std::uint8_t*>(window->second.mapping->get()) + offset;
    } catch (const NativeError&) {
        // It stays unmapped; system calls reach it.
    }
}

}  // namespace aioflagcx::verbs::soft::local
