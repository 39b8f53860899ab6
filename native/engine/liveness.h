// Tells whether peers are alive, independently of any event loop: one native thread per engine
// that sends and times keepalives. A process that is merely busy goes on sending; one that is
// stopped, dead or cut off does not.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "common/event_fd.h"
#include "common/unique_fd.h"
#include "engine/stats.h"

namespace aioflagcx::engine {

using KeepaliveToken = std::array<std::uint8_t, 16>;

// Wire format (docs/handshake.md, "Keepalive"): the initiator connects and sends a 24-byte hello
// {"AFKA", version u16 = 1, u16 0, token}; from then on each side sends 8-byte beats.
//
// Idle sessions cost one wake-up an interval, however many they are: beats of all connections go
// out on a common tick, and what has come in is read then, too; it wakes nobody before. Only the
// end of a connection does, so a dead process is noticed at once.
//
// Lock: mutex_ guards `commands_`; a leaf. All connections belong to the thread.
class Liveness {
  public:
    using Seconds = std::chrono::duration<double>;
    // Called once, on the liveness thread, holding no lock. No beat goes out meanwhile.
    using Lost = std::function<void(const std::string& reason)>;

    Liveness(const std::string& bind_address, Stats& stats);
    ~Liveness();

    std::uint16_t port() const noexcept { return port_; }

    // Target's side: the initiator must present `token` and then be heard at least every
    // `timeout`; it is sent a beat at least every `interval`, or kMinKeepaliveInterval.
    void expect(std::uint64_t owner, const KeepaliveToken& token, Seconds interval, Seconds timeout,
                Lost lost);
    // Initiator's side.
    void watch(std::uint64_t owner, const std::string& host, std::uint16_t port,
               const KeepaliveToken& token, Seconds interval, Seconds timeout, Lost lost);
    // No call of `owner`'s Lost starts after the thread has come to this.
    void forget(std::uint64_t owner);

    void stop();

  private:
    using Clock = std::chrono::steady_clock;
    using Id = std::uint64_t;  // what epoll tells; never reused, so an old event finds nobody
    struct Link;               // one TCP connection
    struct Expected;           // a token not yet presented

    void command(std::function<void()> command);
    void loop();
    void run_commands();
    void dispatch(Id id, std::uint32_t events);

    void accept_all();
    void rest_listener();
    void drop_oldest_stranger();
    void read_hello(Id id, Link& link);
    void start_watch(Link link, const std::string& host, std::uint16_t port);
    void finish_connect(Id id, Link& link);
    void establish(Id id, Link& link);

    void beat_all(Clock::time_point now);
    void end_silent(Clock::time_point now);
    Clock::time_point run_timers();

    bool set_events(int operation, int fd, Id id, std::uint32_t events) noexcept;
    void disconnect(Link& link) noexcept;
    void end(Id id, const std::string& reason);

    Stats& stats_;
    UniqueFd epoll_;
    UniqueFd listener_;
    std::uint16_t port_ = 0;
    EventFd wake_;

    std::mutex mutex_;
    std::vector<std::function<void()>> commands_;

    // The thread's own.
    bool stopping_ = false;
    Id next_id_;
    std::map<Id, Link> links_;
    std::map<KeepaliveToken, Expected> expected_;
    std::size_t strangers_ = 0;                                  // accepted, no token yet
    Clock::time_point tick_ = Clock::time_point::max();          // when beats are due next
    Clock::time_point listen_again_ = Clock::time_point::max();  // out of descriptors until then
    std::thread thread_;
};

}  // namespace aioflagcx::engine
