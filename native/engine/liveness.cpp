#include "engine/liveness.h"

#include <netinet/tcp.h>
#include <sys/epoll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <limits>
#include <optional>
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

constexpr std::array<std::uint8_t, 8> kBeat{};  // whatever it holds; any byte is a sign of life

constexpr std::uint64_t kWakeId = 0;
constexpr std::uint64_t kListenerId = 1;
constexpr std::uint64_t kFirstId = 2;

std::chrono::steady_clock::duration ticks(Liveness::Seconds seconds) {
    constexpr Liveness::Seconds kLong{1e9};  // far inside the clock's range
    if (!(seconds < kLong)) seconds = kLong;
    return std::chrono::duration_cast<std::chrono::steady_clock::duration>(seconds);
}

std::chrono::steady_clock::duration beat_interval(Liveness::Seconds seconds) {
    return std::max<std::chrono::steady_clock::duration>(ticks(seconds), kMinKeepaliveInterval);
}

std::string silent_for(Liveness::Seconds timeout) {
    std::string text = std::to_string(timeout.count());
    text.resize(std::min(text.size(), text.find('.') + 3));
    return "no keepalive for " + text + " s (stopped, or cut off)";
}

// A process that exits with something unread resets the connection instead of closing it.
std::string end_of_connection(int error) {
    if (error == 0 || error == ECONNRESET || error == EPIPE) {
        return "the peer closed its connections (exited, or gave us up)";
    }
    return std::string("keepalive connection: ") + std::strerror(error);
}

int take_error(int fd) noexcept {
    int error = 0;
    socklen_t size = sizeof error;
    ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    return error;
}

// Of a listener: what it accepts inherits them.
void set_options(int fd) noexcept {
    const int one = 1;
    ::setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    // A peer that floods us, or reads nothing, costs this much; then it waits for our next tick.
    const int size = kKeepaliveBuffer;
    ::setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    ::setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

// Takes what has come. Whether that was anything.
bool heard(int fd) noexcept {
    std::array<std::uint8_t, kKeepaliveReadAtOnce> bytes;
    return ::recv(fd, bytes.data(), bytes.size(), 0) > 0;
}

// Never waits. A beat for which there is no room is left out: the peer has not read those before.
void send_beat(int fd) noexcept {
    [[maybe_unused]] ssize_t ignored = ::send(fd, kBeat.data(), kBeat.size(), MSG_NOSIGNAL);
}

}  // namespace

struct Liveness::Expected {
    std::uint64_t owner = 0;
    Seconds interval{};
    Seconds timeout{};
    Clock::time_point deadline;
    bool late = false;  // its time is over, but it may just have come
    Lost lost;
};

struct Liveness::Link {
    enum class State {
        Connecting,   // an initiator's, until TCP is connected
        Stranger,     // accepted, has not presented a token
        Established,  // both sides send beats
    };

    UniqueFd fd;
    State state = State::Stranger;
    std::uint64_t owner = 0;
    KeepaliveToken token{};
    Clock::duration interval{};
    Seconds timeout{};
    Clock::time_point deadline;  // by which something must have come
    Clock::time_point beat_by;   // when the next beat must have gone out
    Lost lost;
    std::array<std::uint8_t, sizeof(Hello)> hello{};
    std::size_t hello_size = 0;
};

Liveness::Liveness(const std::string& bind_address, Stats& stats)
    : stats_(stats), epoll_(::epoll_create1(EPOLL_CLOEXEC)), next_id_(kFirstId) {
    if (!epoll_) throw NativeError("epoll_create1", errno, "keepalive");
    listener_ = listen_on(bind_address, &port_);
    set_options(listener_.get());
    if (!set_events(EPOLL_CTL_ADD, wake_.fd(), kWakeId, EPOLLIN) ||
        !set_events(EPOLL_CTL_ADD, listener_.get(), kListenerId, EPOLLIN)) {
        throw NativeError("epoll_ctl", errno, "keepalive");
    }
    thread_ = start_thread("afx-liveness", [this] { loop(); });
}

Liveness::~Liveness() { stop(); }

void Liveness::stop() {
    if (!thread_.joinable()) return;
    command([this] { stopping_ = true; });
    thread_.join();
    // Not left to close(), here and below: a fork()ed child may hold a copy of the descriptor.
    // What nobody has accepted is reset: those peers must not wait for their timeout.
    ::shutdown(listener_.get(), SHUT_RDWR);
    listener_.reset();
    for (auto& [id, link] : links_) disconnect(link);
    links_.clear();
    expected_.clear();
}

void Liveness::command(std::function<void()> command) {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
    wake_.signal();
}

void Liveness::expect(std::uint64_t owner, const KeepaliveToken& token, Seconds interval,
                      Seconds timeout, Lost lost) {
    command([this, owner, token, interval, timeout, lost = std::move(lost)] {
        expected_[token] =
            Expected{owner, interval, timeout, Clock::now() + ticks(timeout), false, lost};
    });
}

void Liveness::watch(std::uint64_t owner, const std::string& host, std::uint16_t port,
                     const KeepaliveToken& token, Seconds interval, Seconds timeout, Lost lost) {
    command([=, this, lost = std::move(lost)] {
        Link link;
        link.state = Link::State::Connecting;
        link.owner = owner;
        link.token = token;
        link.interval = beat_interval(interval);
        link.timeout = timeout;
        link.deadline = Clock::now() + ticks(timeout);
        link.lost = lost;
        start_watch(std::move(link), host, port);
    });
}

void Liveness::forget(std::uint64_t owner) {
    command([this, owner] {
        std::erase_if(expected_, [&](const auto& item) { return item.second.owner == owner; });
        for (auto item = links_.begin(); item != links_.end();) {
            Link& link = item->second;
            if (link.state == Link::State::Stranger || link.owner != owner) {
                ++item;
                continue;
            }
            disconnect(link);
            item = links_.erase(item);
        }
    });
}

void Liveness::loop() {
    std::array<epoll_event, 64> events;
    while (!stopping_) {
        const auto next = run_timers();
        int timeout_ms = -1;
        if (next != Clock::time_point::max()) {
            const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
            timeout_ms = static_cast<int>(
                std::clamp<std::int64_t>(left.count(), 0, std::numeric_limits<int>::max()));
        }
        const int count = ::epoll_wait(epoll_.get(), events.data(), events.size(), timeout_ms);
        add(stats_.keepalive_wakeups);
        for (int i = 0; i < count && !stopping_; ++i) {
            const epoll_event& event = events[static_cast<std::size_t>(i)];
            dispatch(event.data.u64, event.events);
        }
    }
}

void Liveness::dispatch(Id id, std::uint32_t events) {
    if (id == kWakeId) return run_commands();
    if (id == kListenerId) return accept_all();
    const auto found = links_.find(id);
    if (found == links_.end()) return;
    Link& link = found->second;
    switch (link.state) {
        case Link::State::Connecting:
            return finish_connect(id, link);
        case Link::State::Stranger:
            return read_hello(id, link);
        case Link::State::Established:
            if (events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) {
                end(id, end_of_connection(take_error(link.fd.get())));
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

// ---- New connections ----------------------------------------------------------------------------

void Liveness::accept_all() {
    for (int i = 0; i < kKeepaliveAcceptsPerTurn; ++i) {
        UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                rest_listener();
            }
            return;  // level-triggered: whatever else it was, epoll says when to try again
        }
        if (strangers_ >= kMaxKeepaliveStrangers) drop_oldest_stranger();
        const Id id = next_id_++;
        if (!set_events(EPOLL_CTL_ADD, fd.get(), id, EPOLLIN)) continue;
        Link& link = links_[id];
        link.fd = std::move(fd);
        link.deadline = Clock::now() + kKeepaliveHelloTimeout;
        ++strangers_;
        read_hello(id, link);  // which often is here already
    }
}

void Liveness::rest_listener() {
    set_events(EPOLL_CTL_MOD, listener_.get(), kListenerId, 0);
    listen_again_ = Clock::now() + kKeepaliveAcceptPause;
}

void Liveness::drop_oldest_stranger() {
    const auto oldest = std::find_if(links_.begin(), links_.end(), [](const auto& item) {
        return item.second.state == Link::State::Stranger;
    });
    end(oldest->first, "");
}

void Liveness::read_hello(Id id, Link& link) {
    const ssize_t got = ::recv(link.fd.get(), link.hello.data() + link.hello_size,
                               link.hello.size() - link.hello_size, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) return end(id, "");
    link.hello_size += static_cast<std::size_t>(got);
    if (link.hello_size < link.hello.size()) return;
    Hello hello{};
    std::memcpy(&hello, link.hello.data(), sizeof hello);
    run_commands();  // one may say whom we expect
    const auto found = expected_.find(hello.token);
    if (hello.magic != kMagic || hello.version != kVersion || found == expected_.end()) {
        return end(id, "");
    }
    Expected& expected = found->second;
    link.owner = expected.owner;
    link.interval = beat_interval(expected.interval);
    link.timeout = expected.timeout;
    link.lost = std::move(expected.lost);
    expected_.erase(found);
    --strangers_;
    establish(id, link);
}

void Liveness::start_watch(Link link, const std::string& host, std::uint16_t port) {
    try {
        const SocketAddress address = SocketAddress::numeric(host, port);
        link.fd =
            UniqueFd(::socket(address.family(), SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
        if (!link.fd) throw NativeError("socket", errno, "keepalive");
        set_options(link.fd.get());
        if (::connect(link.fd.get(), address.get(), address.length) != 0 && errno != EINPROGRESS) {
            throw NativeError("connect", errno, "keepalive");
        }
        const Id id = next_id_++;
        if (!set_events(EPOLL_CTL_ADD, link.fd.get(), id, EPOLLOUT)) {
            throw NativeError("epoll_ctl", errno, "keepalive");
        }
        links_.emplace(id, std::move(link));
    } catch (const NativeError& failure) {
        link.lost(failure.what());
    }
}

void Liveness::finish_connect(Id id, Link& link) {
    if (const int error = take_error(link.fd.get()); error != 0) {
        return end(id, std::string("keepalive connection: ") + std::strerror(error));
    }
    const Hello hello{kMagic, kVersion, 0, link.token};
    // Always fits, as the first there is. A broken connection is told by epoll.
    [[maybe_unused]] ssize_t ignored = ::send(link.fd.get(), &hello, sizeof hello, MSG_NOSIGNAL);
    establish(id, link);
}

// The first beat goes out at once, the next with all others' on the common tick.
void Liveness::establish(Id id, Link& link) {
    const auto now = Clock::now();
    link.state = Link::State::Established;
    link.deadline = now + ticks(link.timeout);
    link.beat_by = now + link.interval;
    tick_ = std::min(tick_, link.beat_by);
    send_beat(link.fd.get());
    if (!set_events(EPOLL_CTL_MOD, link.fd.get(), id, EPOLLRDHUP)) {
        end(id, std::string("keepalive connection: ") + std::strerror(errno));
    }
}

// ---- Timers -------------------------------------------------------------------------------------

// The pause between two ticks is the shortest interval of all links. A link whose beat could not
// wait for the next tick gets its turn on this one, so there never is a wake-up between two ticks.
void Liveness::beat_all(Clock::time_point now) {
    Clock::duration pause = Clock::duration::max();
    for (const auto& [id, link] : links_) {
        if (link.state == Link::State::Established) pause = std::min(pause, link.interval);
    }
    if (pause == Clock::duration::max()) {
        tick_ = Clock::time_point::max();
        return;
    }
    const auto tick = now - tick_ < pause ? tick_ : now;  // ticks that were missed are left out
    tick_ = tick + pause;
    for (auto& [id, link] : links_) {
        if (link.state != Link::State::Established || link.beat_by >= tick_) continue;
        link.beat_by = tick + link.interval;
        send_beat(link.fd.get());
        if (heard(link.fd.get())) link.deadline = now + ticks(link.timeout);
    }
}

void Liveness::end_silent(Clock::time_point now) {
    std::vector<Id> late;
    for (auto& [id, link] : links_) {
        if (link.deadline <= now) late.push_back(id);
    }
    for (const Id id : late) {
        const auto found = links_.find(id);
        if (found == links_.end()) continue;
        Link& link = found->second;
        // This thread may be what is late: what has come counts.
        if (link.state == Link::State::Stranger) {
            read_hello(id, link);
            if (!links_.contains(id)) continue;
        }
        if (link.state == Link::State::Established && heard(link.fd.get())) {
            link.deadline = now + ticks(link.timeout);
        }
        if (link.deadline <= now) end(id, silent_for(link.timeout));
    }
    std::vector<Expected> missing;
    for (auto item = expected_.begin(); item != expected_.end();) {
        Expected& expected = item->second;
        // Likewise: it is lost if the listener has nothing from it either.
        if (expected.deadline > now || !std::exchange(expected.late, true)) {
            ++item;
            continue;
        }
        missing.push_back(std::move(expected));
        item = expected_.erase(item);
    }
    for (const Expected& expected : missing) expected.lost(silent_for(expected.timeout));
}

// Handles what is due and says when to come back.
Liveness::Clock::time_point Liveness::run_timers() {
    const auto now = Clock::now();
    if (listen_again_ <= now) {
        listen_again_ = Clock::time_point::max();
        set_events(EPOLL_CTL_MOD, listener_.get(), kListenerId, EPOLLIN);
    }
    if (tick_ <= now) beat_all(now);
    end_silent(now);
    auto next = std::min(listen_again_, tick_);
    for (const auto& [id, link] : links_) next = std::min(next, link.deadline);
    for (const auto& [token, expected] : expected_) next = std::min(next, expected.deadline);
    return next;
}

// ---- Descriptors --------------------------------------------------------------------------------

bool Liveness::set_events(int operation, int fd, Id id, std::uint32_t events) noexcept {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    return ::epoll_ctl(epoll_.get(), operation, fd, &event) == 0;
}

// Both not left to close(): a fork()ed child's copy of the descriptor would keep the connection
// open and epoll talking.
void Liveness::disconnect(Link& link) noexcept {
    set_events(EPOLL_CTL_DEL, link.fd.get(), 0, 0);
    ::shutdown(link.fd.get(), SHUT_RDWR);
    link.fd.reset();
}

void Liveness::end(Id id, const std::string& reason) {
    auto node = links_.extract(id);
    Link& link = node.mapped();
    if (link.state == Link::State::Stranger) --strangers_;
    disconnect(link);
    if (link.lost) link.lost(reason);
}

}  // namespace aioflagcx::engine
