#include "verbs/soft/io_thread.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <exception>

#include "common/error.h"
#include "common/socket_address.h"
#include "common/thread.h"
#include "verbs/soft/socket.h"

namespace aioflagcx::verbs::soft {

namespace {

constexpr std::uint64_t kWakeId = 0;
constexpr std::uint64_t kListenerId = 1;
constexpr std::uint64_t kLocalListenerId = 2;
constexpr std::uint64_t kFirstId = 3;

}  // namespace

IoThread::IoThread(const std::string& bind_address, bool local)
    : epoll_(::epoll_create1(EPOLL_CLOEXEC)), next_id_(kFirstId) {
    if (!epoll_) throw NativeError("epoll_create1", errno, "");
    listener_ = listen_on(bind_address, &port_);
    watch(wake_.fd(), kWakeId, EPOLLIN);
    watch(listener_.get(), kListenerId, EPOLLIN);
    if (local) watch(local_.emplace().fd(), kLocalListenerId, EPOLLIN);
    thread_ = start_thread("aioflagcx-soft", [this] { run(); });
}

IoThread::~IoThread() { stop(); }

void IoThread::stop() {
    std::call_once(stop_once_, [this] {
        stopping_.store(true, std::memory_order_release);
        wake_.signal();
        thread_.join();
    });
}

void IoThread::expose(const std::shared_ptr<Responder>& responder) { exposed_.add(responder); }

void IoThread::retract(const std::shared_ptr<Responder>& responder) {
    exposed_.remove(responder->token());
    {
        const std::lock_guard lock(mutex_);
        retracted_.push_back(responder);
    }
    wake_.signal();
}

void IoThread::run() {
    std::array<epoll_event, kEventsAtOnce> events;
    while (!stopping_.load(std::memory_order_acquire)) {
        const int count = ::epoll_wait(epoll_.get(), events.data(), kEventsAtOnce, timeout());
        for (int i = 0; i < count; ++i) {
            const epoll_event& event = events[static_cast<std::size_t>(i)];
            dispatch(event.data.u64, event.events);
        }
        expire();
    }
    while (!groups_.empty()) close_group(groups_.begin()->first);
    hellos_.clear();
    listener_.reset();
    if (local_) local_->close();
    const std::lock_guard lock(mutex_);
    retracted_.clear();
}

void IoThread::dispatch(Id id, std::uint32_t events) {
    if (id == kWakeId) {
        wake_.clear();
        return close_retracted();
    }
    if (id == kListenerId || id == kLocalListenerId) return accept_all(id == kLocalListenerId);
    if (const auto hello = hellos_.find(id); hello != hellos_.end()) return hello_ready(hello);
    const auto guest = guests_.find(id);
    const auto stream = streams_.find(id);
    if (guest == guests_.end() && stream == streams_.end()) return;
    Responder* const responder =
        guest != guests_.end() ? guest->second.responder : &stream->second.stream->responder();
    try {
        if (guest != guests_.end()) return guest_ready(guest->second);
        stream_ready(id, stream->second, events);
    } catch (const std::exception&) {
        close_group(responder);  // out of memory costs the one that asked for it
    }
}

// Milliseconds until expire() has something to do, as epoll_wait wants them.
int IoThread::timeout() const {
    Deadline next = listen_again_;
    if (!hellos_.empty()) next = std::min(next, hellos_.begin()->second.deadline);
    if (!lingering_.empty()) next = std::min(next, lingering_.front().first);
    if (next == Deadline::max()) return -1;
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(next - Clock::now());
    return static_cast<int>(std::max<std::int64_t>(left.count(), 0));
}

void IoThread::expire() {
    if (hellos_.empty() && lingering_.empty() && listen_again_ == Deadline::max()) return;
    const Clock::time_point now = Clock::now();
    while (!hellos_.empty() && hellos_.begin()->second.deadline <= now) {
        drop_hello(hellos_.begin());
    }
    while (!lingering_.empty() && lingering_.front().first <= now) {
        close_group(lingering_.front().second.get());
        lingering_.pop_front();
    }
    if (listen_again_ <= now) {
        listen_again_ = Deadline::max();
        set_listeners(EPOLLIN);
    }
}

// ---- New connections -------------------------------------------------------------------------

void IoThread::accept_all(bool local) {
    const int listener = local ? local_->fd() : listener_.get();
    for (int i = 0; i < kAcceptsPerTurn; ++i) {
        UniqueFd fd(::accept4(listener, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
        if (!fd) {
            if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
                rest_listeners();
            }
            return;  // level-triggered: whatever else it was, epoll says when to try again
        }
        if (!local) set_no_delay(fd.get());
        if (hellos_.size() >= kMaxHellos) drop_hello(hellos_.begin());
        const Id id = next_id_++;
        try {
            watch(fd.get(), id, EPOLLIN);
            hellos_.emplace(id, Hello{std::move(fd), Clock::now() + kHelloTimeout, local, {}, 0});
        } catch (const std::exception&) {
            // No room to watch it: it is closed, and the next may find some.
        }
    }
}

void IoThread::rest_listeners() {
    set_listeners(0);
    listen_again_ = Clock::now() + kAcceptPause;
}

void IoThread::set_listeners(std::uint32_t events) noexcept {
    set_events(listener_.get(), kListenerId, events);
    if (local_) set_events(local_->fd(), kLocalListenerId, events);
}

void IoThread::hello_ready(std::map<Id, Hello>::iterator entry) {
    Hello& hello = entry->second;
    if (hello.local) {
        try {
            if (admit_guest(hello)) return;
        } catch (const std::exception&) {
            // Out of memory or descriptors, as below.
        }
        drop_hello(entry);
        return;
    }
    iovec piece{hello.bytes.data() + hello.have, hello.bytes.size() - hello.have};
    const ssize_t got = receive_pieces(hello.fd.get(), {&piece, 1});
    if (got < 0 && errno == EAGAIN) return;
    if (got > 0) {
        hello.have += static_cast<std::size_t>(got);
        if (hello.have < hello.bytes.size()) return;
        try {
            bind_stream(hello);
        } catch (const std::exception&) {
            // Out of memory or descriptors: the initiator sees its connection close.
        }
    }
    drop_hello(entry);
}

// With its connection, unless that has moved on.
void IoThread::drop_hello(std::map<Id, Hello>::iterator entry) noexcept {
    if (entry->second.fd) end_connection(entry->second.fd.get());
    hellos_.erase(entry);
}

// Moves the connection to the responder it names; leaves it alone when it may not.
bool IoThread::bind_stream(Hello& entry) {
    wire::Hello hello;
    std::memcpy(&hello, entry.bytes.data(), sizeof hello);
    if (hello.magic != wire::kHelloMagic || hello.version != wire::kVersion) return false;
    const std::shared_ptr<Responder> responder = exposed_.find(hello.token);
    if (!responder || hello.stream >= responder->streams()) return false;
    Group& group = groups_[responder.get()];
    group.responder = responder;
    if (group.claimed.test(hello.stream)) return false;

    wire::HelloReply reply{wire::kHelloMagic, wire::kVersion, hello.stream};
    iovec piece{&reply, sizeof reply};
    if (send_pieces(entry.fd.get(), {&piece, 1}) != sizeof reply) return false;
    const Id id = next_id_++;
    const int fd = entry.fd.get();
    Stream stream{std::make_unique<ReceiveStream>(std::move(entry.fd), responder), EPOLLIN};
    group.ids.push_back(id);
    streams_.emplace(id, std::move(stream));
    set_events(fd, id, EPOLLIN);
    group.claimed.set(hello.stream);
    return true;
}

// Moves the connection to the responder that its messages name. True when more of them may come.
bool IoThread::admit_guest(Hello& entry) {
    const int control = entry.fd.get();
    local::Answer admitted = local::answer_stranger(entry.fd, exposed_);
    if (admitted.more) return true;
    if (!entry.fd) unwatch(control);  // a guest has it now
    if (!admitted.responder) return false;
    const std::shared_ptr<local::LocalGuest> guest = admitted.responder->guest();
    Group& group = groups_[admitted.responder.get()];
    group.responder = admitted.responder;
    try {
        const Id id = next_id_++;
        const int fd = admitted.stream.get();
        watch(fd, id, EPOLLIN);
        streams_.emplace(id, Stream{std::make_unique<ReceiveStream>(std::move(admitted.stream),
                                                                    admitted.responder),
                                    EPOLLIN});
        group.ids.push_back(id);
        for (const int watched : {guest->control_fd(), guest->process_fd()}) {
            const Id guest_id = next_id_++;
            watch(watched, guest_id, EPOLLIN);
            guests_.emplace(guest_id, Guest{guest, admitted.responder.get(), watched});
            group.ids.push_back(guest_id);
        }
    } catch (...) {
        close_group(admitted.responder.get());
        throw;
    }
    return false;
}

void IoThread::guest_ready(const Guest& entry) {
    const bool process_ended = entry.fd == entry.guest->process_fd();
    if (process_ended || !local::answer_guest(*entry.responder, *entry.guest)) {
        close_group(entry.responder);
    }
}

// ---- Streams ---------------------------------------------------------------------------------

void IoThread::stream_ready(Id id, Stream& entry, std::uint32_t events) {
    switch (entry.stream->on_ready(events)) {
        case ReceiveStream::Outcome::Open:
            return update_interest(id, entry);
        case ReceiveStream::Outcome::Refused:
            return linger(entry.stream->responder());
        case ReceiveStream::Outcome::Ended:
            return close_group(&entry.stream->responder());
    }
}

void IoThread::update_interest(Id id, Stream& entry) {
    const std::uint32_t wanted = entry.stream->interest();
    if (wanted == entry.interest) return;
    set_events(entry.stream->fd(), id, wanted);
    entry.interest = wanted;
}

// The responder failed and one of its streams carries the reason. The others must not end before
// it has been read, or the initiator would take their end for the reason.
void IoThread::linger(Responder& responder) {
    const auto group = groups_.find(&responder);
    if (group == groups_.end()) return;
    for (const Id id : group->second.ids) {
        const auto entry = streams_.find(id);
        if (entry == streams_.end()) continue;
        entry->second.stream->linger();
        update_interest(id, entry->second);
    }
    exposed_.remove(responder.token());
    lingering_.emplace_back(Clock::now() + kLingerTime, group->second.responder);
}

void IoThread::close_group(Responder* responder) {
    const auto found = groups_.find(responder);
    if (found == groups_.end()) return;
    const Group group = std::move(found->second);
    groups_.erase(found);
    exposed_.remove(group.responder->token());
    group.responder->fail();
    for (const Id id : group.ids) {
        if (const auto guest = guests_.find(id); guest != guests_.end()) {
            unwatch(guest->second.fd);
            guests_.erase(guest);
            continue;
        }
        const auto entry = streams_.find(id);
        if (entry == streams_.end()) continue;
        end_connection(entry->second.stream->fd());
        streams_.erase(entry);
    }
}

void IoThread::close_retracted() {
    std::vector<std::shared_ptr<Responder>> retracted;
    {
        const std::lock_guard lock(mutex_);
        retracted.swap(retracted_);
    }
    for (const auto& responder : retracted) close_group(responder.get());
}

void IoThread::watch(int fd, Id id, std::uint32_t events) {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    if (::epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
        throw NativeError("epoll_ctl", errno, "");
    }
}

void IoThread::unwatch(int fd) noexcept {
    epoll_event unused{};
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, fd, &unused);
}

// Not left to close(): a fork()ed child may hold a copy of the descriptor, which would keep the
// connection open and epoll talking.
void IoThread::end_connection(int fd) noexcept {
    unwatch(fd);
    ::shutdown(fd, SHUT_RDWR);
}

// Of a descriptor that is watched: allocates nothing, so it cannot fail.
void IoThread::set_events(int fd, Id id, std::uint32_t events) noexcept {
    epoll_event event{};
    event.events = events;
    event.data.u64 = id;
    ::epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, fd, &event);
}

}  // namespace aioflagcx::verbs::soft
