// The responders' side of the TCP path: one thread a device, which owns the listener and every
// stream its responders receive on. It never blocks except in epoll_wait.
#pragma once

#include <atomic>
#include <bitset>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "common/event_fd.h"
#include "common/unique_fd.h"
#include "verbs/soft/receive_stream.h"
#include "verbs/soft/registry.h"

namespace aioflagcx::verbs::soft {

class IoThread {
  public:
    // Listens on a port the kernel chooses.
    explicit IoThread(const std::string& bind_address);
    ~IoThread();
    IoThread(const IoThread&) = delete;
    IoThread& operator=(const IoThread&) = delete;

    std::uint16_t port() const noexcept { return port_; }

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
        std::array<std::uint8_t, sizeof(wire::Hello)> bytes;
        std::size_t have = 0;
    };
    struct Stream {
        std::unique_ptr<ReceiveStream> stream;
        std::uint32_t interest = 0;  // what epoll was told last
    };
    struct Group {  // the streams of one responder
        std::shared_ptr<Responder> responder;
        std::bitset<kMaxStreams> claimed;
        std::vector<Id> ids;
    };

    void run();
    void dispatch(Id id, std::uint32_t events);
    int timeout() const;
    void expire();

    void accept_all();
    void rest_listener();
    void hello_ready(std::map<Id, Hello>::iterator hello);
    bool bind_stream(Hello& hello);
    void stream_ready(Id id, Stream& entry, std::uint32_t events);
    void update_interest(Id id, Stream& entry);
    void linger(Responder& responder);
    void close_group(Responder* responder);
    void close_retracted();
    void watch(int fd, Id id, std::uint32_t events);
    void set_events(int fd, Id id, std::uint32_t events) noexcept;

    UniqueFd listener_;
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
    std::unordered_map<Responder*, Group> groups_;
    std::deque<std::pair<Deadline, std::shared_ptr<Responder>>> lingering_;
    Deadline listen_again_ = Deadline::max();

    std::once_flag stop_once_;
    std::thread thread_;  // last: it uses all of the above
};

}  // namespace aioflagcx::verbs::soft
