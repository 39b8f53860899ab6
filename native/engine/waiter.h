// Where a thread waits: for one transfer, whose success then does not pass through the event ring,
// or for anything else that ends once.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>

#include "verbs/verbs.h"

namespace aioflagcx::engine {

class TransferTask;
class TransferQueue;

// A gate that opens once, on a futex(2) rather than a condition variable: waiting is to return
// when a signal has come. Any number of threads may wait.
class Waiter {
  public:
    Waiter() = default;
    Waiter(const Waiter&) = delete;
    Waiter& operator=(const Waiter&) = delete;

    bool is_open() const noexcept { return gate_.load(std::memory_order_acquire) == kOpen; }
    void open() noexcept;
    // Until it is open, the deadline has passed or a signal handler has run; whether it is open.
    bool wait(verbs::Deadline deadline) noexcept;

  private:
    friend class TransferQueue;

    // What became of the transfer that was submitted with this. Only success opens the gate: all
    // else is reported on the event ring, and whoever handles that opens it.
    enum class Stage : std::uint8_t {
        Fresh,      // not submitted
        Submitted,  // `task` will end here
        Landed,     // has ended here
        OnRing,     // failed, or taken back: the ring tells how it ends
        Refused,    // taken back before it was submitted, which is now refused
    };

    static constexpr std::uint32_t kShut = 0;
    static constexpr std::uint32_t kSleeping = 1;  // shut, and somebody has to be woken
    static constexpr std::uint32_t kOpen = 2;

    std::atomic<std::uint32_t> gate_{kShut};

    // Guarded by the mutex of the TransferQueue that the transfer is submitted to; there is only
    // one. The task holds its waiter from submit() until it is finished or taken back.
    Stage stage_ = Stage::Fresh;
    std::shared_ptr<TransferTask> task_;
};

}  // namespace aioflagcx::engine
