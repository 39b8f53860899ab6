// Tells whether peers are alive, independently of any event loop: one native thread per engine
// that sends, answers and times keepalives. A process that is merely busy answers; one that is
// stopped, dead or cut off does not.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/event_fd.h"
#include "common/unique_fd.h"

namespace aioflagcx::engine {

using KeepaliveToken = std::array<std::uint8_t, 16>;

// Wire format (docs/handshake.md, "Keepalive"): the initiator connects, sends a 24-byte hello
// {"AFKA", version u16 = 1, u16 0, token}, then 8-byte pings; each comes back as it was sent.
//
// Lock: mutex_ guards `commands_`; a leaf. All connections belong to the thread.
class Liveness {
  public:
    using Seconds = std::chrono::duration<double>;
    // Called once, on the liveness thread, holding no lock.
    using Lost = std::function<void(const std::string& reason)>;

    explicit Liveness(const std::string& bind_address);
    ~Liveness();

    std::uint16_t port() const noexcept { return port_; }

    // Target's side: the initiator must present `token` and then be heard at least every `timeout`.
    void expect(std::uint64_t owner, const KeepaliveToken& token, Seconds timeout, Lost lost);
    // Initiator's side.
    void watch(std::uint64_t owner, const std::string& host, std::uint16_t port,
               const KeepaliveToken& token, Seconds interval, Seconds timeout, Lost lost);
    // No call of `owner`'s Lost starts after the thread has come to this.
    void forget(std::uint64_t owner);

    void stop();

  private:
    using Clock = std::chrono::steady_clock;
    struct Link;      // one TCP connection
    struct Expected;  // a token not yet presented

    void command(std::function<void()> command);
    void loop();
    void run_commands();
    void accept_all();
    void watch_listener(std::uint32_t events);
    void drop_oldest_stranger();
    void on_readable(const std::shared_ptr<Link>& link);
    void on_hello(const std::shared_ptr<Link>& link);
    void on_writable(const std::shared_ptr<Link>& link);
    void send(const std::shared_ptr<Link>& link, const void* data, std::size_t size);
    void flush(const std::shared_ptr<Link>& link);
    void close_link(const std::shared_ptr<Link>& link, const std::string& reason);
    Clock::time_point run_timers(Clock::time_point now);
    void start_watch(const std::shared_ptr<Link>& link, const std::string& host,
                     std::uint16_t port);

    UniqueFd epoll_;
    UniqueFd listener_;
    std::uint16_t port_ = 0;
    EventFd wake_;

    std::mutex mutex_;
    std::vector<std::function<void()>> commands_;

    bool stopping_ = false;                       // thread's own, set by a command
    std::map<int, std::shared_ptr<Link>> links_;  // by descriptor
    std::map<KeepaliveToken, Expected> expected_;
    std::size_t strangers_ = 0;                                  // accepted, no token yet
    Clock::time_point listen_again_ = Clock::time_point::max();  // out of descriptors until then
    std::thread thread_;
};

}  // namespace aioflagcx::engine
