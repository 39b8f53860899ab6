#include "engine/liveness.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "common/error.h"
#include "common/socket_address.h"
#include "common/thread.h"
#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

constexpr std::uint32_t kMagic = 0x414B'4641;  // "AFKA"
constexpr std::uint16_t kVersion = 1;

struct Hello {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t reserved;
    KeepaliveToken token;
};
static_assert(sizeof(Hello) == 24);

constexpr std::size_t kPing = 8;  // bytes; their content is the initiator's business

std::chrono::steady_clock::duration ticks(Liveness::Seconds seconds) {
    constexpr Liveness::Seconds kLong{1e9};  // far inside the clock's range
    if (!(seconds < kLong)) seconds = kLong;
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds);
}

std::string silent_for(Liveness::Seconds timeout) {
    std::string text = std::to_string(timeout.count());
    text.resize(std::min(text.size(), text.find('.') + 3));
    return "no keepalive for " + text + " s (stopped, or cut off)";
}

}  // namespace

struct Liveness::Expected {
    std::uint64_t owner = 0;
    Seconds timeout{};
    Clock::time_point deadline;
    Lost lost;
};

struct Liveness::Link {
    UniqueFd fd;
    bool initiator = false;
    bool connected = true;
    bool known = false;  // token presented (always for an initiator)
    bool want_write = false;
    std::uint64_t owner = 0;
    KeepaliveToken token{};
    Seconds interval{};
    Seconds timeout{};
    Clock::time_point deadline;
    Clock::time_point next_ping = Clock::time_point::max();
    std::uint64_t pings = 0;
    Lost lost;
    std::array<std::uint8_t, sizeof(Hello)> in{};
    std::size_t in_size = 0;
    std::string out;  // at most one hello and the pongs of one read
};

Liveness::Liveness(const std::string& bind_address) : epoll_(::epoll_create1(EPOLL_CLOEXEC)) {
    if (!epoll_) throw NativeError("epoll_create1", errno, "keepalive");
    listener_ = listen_on(bind_address, &port_);
    for (const int fd : {listener_.get(), wake_.fd()}) {
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = fd;
        if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
            throw NativeError("epoll_ctl", errno, "keepalive");
        }
    }
    thread_ = start_thread("afx-liveness", [this] { loop(); });
}

Liveness::~Liveness() { stop(); }

void Liveness::stop() {
    if (!thread_.joinable()) return;
    command([this] { stopping_ = true; });
    thread_.join();
    listener_.reset();  // resets what nobody accepted: those peers must not wait for their timeout
    links_.clear();
    expected_.clear();
}

void Liveness::command(std::function<void()> command) {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    wake_.signal();
}

void Liveness::expect(std::uint64_t owner, const KeepaliveToken& token, Seconds timeout,
                      Lost lost) {
    command([this, owner, token, timeout, lost = std::move(lost)] {
        expected_[token] = Expected{owner, timeout, Clock::now() + ticks(timeout), lost};
    });
}

void Liveness::watch(std::uint64_t owner, const std::string& host, std::uint16_t port,
                     const KeepaliveToken& token, Seconds interval, Seconds timeout, Lost lost) {
    auto link = std::make_shared<Link>();
    link->initiator = true;
    link->known = true;
    link->owner = owner;
    link->token = token;
    link->interval = interval;
    link->timeout = timeout;
    link->lost = std::move(lost);
    command([this, link, host, port] { start_watch(link, host, port); });
}

void Liveness::forget(std::uint64_t owner) {
    command([this, owner] {
        std::erase_if(expected_, [&](const auto& item) { return item.second.owner == owner; });
        std::erase_if(links_, [&](const auto& item) {
            return item.second->known && item.second->owner == owner;
        });
    });
}

void Liveness::start_watch(const std::shared_ptr<Link>& link, const std::string& host,
                           std::uint16_t port) {
    link->deadline = Clock::now() + ticks(link->timeout);
    int error = 0;
    try {
        const SocketAddress address = SocketAddress::numeric(host, port);
        link->fd =
            UniqueFd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!link->fd) throw NativeError("socket", errno, "keepalive");
        if (::connect(link->fd.get(), address.get(), address.length) != 0) error = errno;
    } catch (const NativeError& failure) {
        link->lost(failure.what());
        return;
    }
    if (error != 0 && error != EINPROGRESS) {
        link->lost(std::string("keepalive connection: ") + std::strerror(error));
        return;
    }
    link->connected = false;
    epoll_event event{};
    event.events = EPOLLIN | EPOLLOUT;
    event.data.fd = link->fd.get();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->fd.get(), &event);
    link->want_write = true;
    links_[link->fd.get()] = link;
}

void Liveness::loop() {
    std::array<epoll_event, 64> events;
    while (!stopping_) {
        const auto now = Clock::now();
        const auto next = run_timers(now);
        int timeout_ms = -1;
        if (next != Clock::time_point::max()) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - now).count();
            timeout_ms = static_cast<int>(std::clamp<std::int64_t>(left, 0, 60'000));
        }
        const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
        run_commands();
        for (int i = 0; i < count && !stopping_; ++i) {
            const int fd = events[static_cast<std::size_t>(i)].data.fd;
            if (fd == listener_.get()) accept_all();
            const auto found = links_.find(fd);
            if (found == links_.end()) continue;
            const std::shared_ptr<Link> link = found->second;
            const std::uint32_t what = events[static_cast<std::size_t>(i)].events;
            if (what & (EPOLLOUT | EPOLLERR)) on_writable(link);
            if (link->fd && (what & (EPOLLIN | EPOLLHUP | EPOLLERR))) on_readable(link);
        }
    }
}

void Liveness::run_commands() {
    std::vector<std::function<void()>> commands;
    {
        const std::lock_guard lock(mutex_);
        commands.swap(commands_);
        wake_.clear();
    }
    for (const auto& command : commands) command();
}

void Liveness::accept_all() {
    for (int i = 0; i < kKeepaliveAcceptsPerTurn; ++i) {
        UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                listen_again_ = Clock::now() + kKeepaliveAcceptPause;
                watch_listener(0);
            }
            return;  // level-triggered: whatever else it was, epoll says when to try again
        }
        if (strangers_ >= kMaxKeepaliveStrangers) drop_oldest_stranger();
        auto link = std::make_shared<Link>();
        link->fd = std::move(fd);
        link->deadline = Clock::now() + kKeepaliveHelloTimeout;
        epoll_event event{};
        event.events = EPOLLIN;
        event.data.fd = link->fd.get();
        if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, link->fd.get(), &event) != 0) continue;
        ++strangers_;
        const int one = 1;
        ::setsockopt(link->fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        links_[link->fd.get()] = std::move(link);
    }
}

void Liveness::watch_listener(std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.fd = listener_.get();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, listener_.get(), &event);
}

void Liveness::drop_oldest_stranger() {
    std::shared_ptr<Link> oldest;
    for (const auto& [fd, link] : links_) {
        if (!link->known && (!oldest || link->deadline < oldest->deadline)) oldest = link;
    }
    close_link(oldest, "");
}

// Reads a bounded number of messages, so that a peer that never stops costs only its own.
void Liveness::on_readable(const std::shared_ptr<Link>& link) {
    for (int i = 0; i < kKeepaliveMessagesPerTurn; ++i) {
        const std::size_t want = (link->known ? kPing : sizeof(Hello)) - link->in_size;
        const ssize_t got = ::recv(link->fd.get(), link->in.data() + link->in_size, want, 0);
        if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
        if (got <= 0) {
            close_link(link, got == 0
                                 ? "the peer closed its connections (exited, or gave us up)"
                                 : std::string("keepalive connection: ") + std::strerror(errno));
            return;
        }
        link->in_size += static_cast<std::size_t>(got);
        if (static_cast<std::size_t>(got) < want) continue;
        link->in_size = 0;
        if (!link->known) {
            on_hello(link);
            if (!link->fd) return;
        } else {
            link->deadline = Clock::now() + ticks(link->timeout);
            if (!link->initiator) send(link, link->in.data(), kPing);
        }
    }
}

void Liveness::on_hello(const std::shared_ptr<Link>& link) {
    Hello hello{};
    std::memcpy(&hello, link->in.data(), sizeof hello);
    const auto found = expected_.find(hello.token);
    if (hello.magic != kMagic || hello.version != kVersion || found == expected_.end()) {
        close_link(link, "");
        return;
    }
    --strangers_;
    link->known = true;
    link->owner = found->second.owner;
    link->timeout = found->second.timeout;
    link->lost = std::move(found->second.lost);
    link->deadline = Clock::now() + ticks(link->timeout);
    expected_.erase(found);
}

void Liveness::on_writable(const std::shared_ptr<Link>& link) {
    if (!link->connected) {
        int error = 0;
        socklen_t size = sizeof error;
        ::getsockopt(link->fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
        if (error != 0) {
            close_link(link, std::string("keepalive connection: ") + std::strerror(error));
            return;
        }
        link->connected = true;
        const int one = 1;
        ::setsockopt(link->fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        const Hello hello{kMagic, kVersion, 0, link->token};
        link->next_ping = Clock::now();
        send(link, &hello, sizeof hello);
        return;
    }
    flush(link);
}

void Liveness::send(const std::shared_ptr<Link>& link, const void* data, std::size_t size) {
    // A peer that does not read costs one message, not an ever-growing queue.
    if (link->out.size() <= sizeof(Hello)) link->out.append(static_cast<const char*>(data), size);
    flush(link);
}

void Liveness::flush(const std::shared_ptr<Link>& link) {
    while (!link->out.empty()) {
        const ssize_t sent =
            ::send(link->fd.get(), link->out.data(), link->out.size(), MSG_NOSIGNAL);
        if (sent < 0) break;  // a broken connection shows when reading
        link->out.erase(0, static_cast<std::size_t>(sent));
    }
    const bool want_write = !link->out.empty();
    if (want_write == link->want_write) return;
    link->want_write = want_write;
    epoll_event event{};
    event.events = want_write ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.fd = link->fd.get();
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, link->fd.get(), &event);
}

void Liveness::close_link(const std::shared_ptr<Link>& link, const std::string& reason) {
    links_.erase(link->fd.get());
    link->fd.reset();
    if (!link->known) --strangers_;
    if (link->lost) link->lost(reason);
}

// Handles what is due and says when to come back.
Liveness::Clock::time_point Liveness::run_timers(Clock::time_point now) {
    if (listen_again_ <= now) {
        listen_again_ = Clock::time_point::max();
        watch_listener(EPOLLIN);
    }
    auto next = listen_again_;
    std::vector<std::shared_ptr<Link>> late;
    for (const auto& [fd, link] : links_) {
        if (link->deadline <= now) {
            late.push_back(link);
            continue;
        }
        if (link->next_ping <= now) {
            const std::uint64_t ping = ++link->pings;
            send(link, &ping, sizeof ping);
            link->next_ping = now + ticks(link->interval);
        }
        next = std::min({next, link->deadline, link->next_ping});
    }
    for (const auto& link : late) {
        on_readable(link);  // this thread may be what is late: what has come counts
        if (!link->fd) continue;
        if (link->deadline <= now) {
            close_link(link, silent_for(link->timeout));
        } else {
            next = std::min(next, link->deadline);
        }
    }
    std::vector<Expected> missing;
    std::erase_if(expected_, [&](auto& item) {
        if (item.second.deadline > now) {
            next = std::min(next, item.second.deadline);
            return false;
        }
        missing.push_back(std::move(item.second));
        return true;
    });
    for (const Expected& expected : missing) expected.lost(silent_for(expected.timeout));
    return next;
}

}  // namespace aioflagcx::engine
