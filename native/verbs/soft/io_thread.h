// The responders' side of the paths with streams: one thread a device, which owns the listeners,
// every stream its responders receive on, and what guests of the local path ask for. It never
// blocks except in epoll_wait.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/event_fd.h"
#include "common/unique_fd.h"
#include "verbs/soft/local/service.h"
#include "verbs/soft/receive_stream.h"
#include "verbs/soft/registry.h"

namespace aioflagcx::verbs::soft {

class IoThread {
  public:
    // Listens on a port the kernel chooses and, with `local`, on a Unix socket.
    IoThread(const std::string& bind_address, bool local);
    ~IoThread();
    IoThread(const IoThread&) = delete;
    IoThread& operator=(const IoThread&) = delete;

    std::uint16_t port() const noexcept { return port_; }
    // The local listener's name; zeros when there is none.
    Token local_name() const noexcept { return local_ ? local_->name() : Token{}; }

    // Any thread.
    void expose(const std::shared_ptr<Responder>& responder);  // its streams may say hello
    // They may not any more, and those it has are closed soon. That no memory is touched any more
    // is the responder's gate's doing.
    void retract(const std::shared_ptr<Responder>& responder);
    void stop();  // closes everything and joins; idempotent

  private:
    using Id = std::uint64_t;  // what epoll tells; never reused, so an old event finds nobody
    struct Hello {
        UniqueFd fd;
        Deadline deadline;
        bool local;
        std::array<std::uint8_t, sizeof(wire::Hello)> bytes;
        std::size_t have = 0;
    };
    struct Stream {
        std::unique_ptr<ReceiveStream> stream;
        std::uint32_t interest = 0;  // what epoll was told last
    };
    struct Guest {  // of the local path: what it sends, and the end of its process
        std::shared_ptr<local::LocalGuest> guest;
        Responder* responder;
        int fd;
    };
    struct Group {  // the streams and guest of one responder
        std::shared_ptr<Responder> responder;
        std::bitset<kMaxStreams> claimed;
        std::vector<Id> ids;
    };

    void run();
    void dispatch(Id id, std::uint32_t events);
    int timeout() const;
    void expire();

    void accept_all(bool local);
    void rest_listeners();
    void set_listeners(std::uint32_t events) noexcept;
    void hello_ready(std::map<Id, Hello>::iterator hello);
    bool bind_stream(Hello& hello);
    bool admit_guest(Hello& hello);
    void drop_hello(std::map<Id, Hello>::iterator hello) noexcept;
    void guest_ready(const Guest& entry);
    void stream_ready(Id id, Stream& entry, std::uint32_t events);
    void update_interest(Id id, Stream& entry);
    void linger(Responder& responder);
    void close_group(Responder* responder);
    void close_retracted();
    void watch(int fd, Id id, std::uint32_t events);
    void unwatch(int fd) noexcept;
    void end_connection(int fd) noexcept;
    void set_events(int fd, Id id, std::uint32_t events) noexcept;

    UniqueFd listener_;
    std::optional<local::Listener> local_;
    UniqueFd epoll_;
    EventFd wake_;
    std::uint16_t port_ = 0;
    Registry exposed_;
    std::atomic<bool> stopping_{false};  // written by stop(), then wake_ makes run() look

    std::mutex mutex_;  // guards retracted_; nothing else is taken while it is held
    std::vector<std::shared_ptr<Responder>> retracted_;

    // The thread's own.
    Id next_id_;
    std::map<Id, Hello> hellos_;  // in the order accepted, which is that of their deadlines
    std::unordered_map<Id, Stream> streams_;
    std::unordered_map<Id, Guest> guests_;
    std::unordered_map<Responder*, Group> groups_;
    std::deque<std::pair<Deadline, std::shared_ptr<Responder>>> lingering_;
    Deadline listen_again_ = Deadline::max();

    std::once_flag stop_once_;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace aioflagcx::verbs::soft
