// Announce, check, use: how memory and queue pairs are taken away from threads that use them.
#pragma once

#include <atomic>

namespace aioflagcx::verbs::soft {

// Threads pass through a gate for one bounded use (a copy or one non-blocking system call); who
// closes it returns only when nobody is inside any more, and nobody enters after.
//
// `inside_` and `state_` form a Dekker pair: enter() announces itself and then looks at the state,
// close() changes the state and then looks for announcements. Both need sequential consistency, so
// that at least one of them sees the other.
class Gate {
  public:
    enum class State { Idle, Open, Closed };

    explicit Gate(State state) noexcept : state_(state) {}
    Gate(const Gate&) = delete;
    Gate& operator=(const Gate&) = delete;

    State state() const noexcept { return state_.load(std::memory_order_acquire); }

    // Idle to Open; false when it was closed before.
    bool open() noexcept {
        State idle = State::Idle;
        return state_.compare_exchange_strong(idle, State::Open, std::memory_order_seq_cst);
    }

    bool enter() noexcept {
        // The first look spares a closing thread from waiting for newcomers that must leave again.
        if (state_.load(std::memory_order_relaxed) != State::Open) return false;
        inside_.fetch_add(1, std::memory_order_seq_cst);
        if (state_.load(std::memory_order_seq_cst) == State::Open) return true;
        leave();
        return false;
    }

    void leave() noexcept {
        const int before = inside_.fetch_sub(1, std::memory_order_seq_cst);
        if (before == 1 && state_.load(std::memory_order_seq_cst) == State::Closed) {
            inside_.notify_all();
        }
    }

    // For good. Not from inside. Any number of threads may close; all of them wait.
    void close() noexcept {
        state_.store(State::Closed, std::memory_order_seq_cst);
        for (int count; (count = inside_.load(std::memory_order_seq_cst)) != 0;) {
            inside_.wait(count, std::memory_order_seq_cst);
        }
    }

  private:
    std::atomic<State> state_;
    std::atomic<int> inside_{0};
};

// Enters for a scope. The gate must outlive it.
class GateGuard {
  public:
    explicit GateGuard(Gate& gate) noexcept : gate_(gate.enter() ? &gate : nullptr) {}
    ~GateGuard() {
        if (gate_ != nullptr) gate_->leave();
    }
    GateGuard(const GateGuard&) = delete;
    GateGuard& operator=(const GateGuard&) = delete;

    explicit operator bool() const noexcept { return gate_ != nullptr; }

  private:
    Gate* gate_;
};

}  // namespace aioflagcx::verbs::soft
