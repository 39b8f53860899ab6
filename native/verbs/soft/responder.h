// The target's side of a queue pair, whatever path requests come by.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>

#include "verbs/soft/gate.h"
#include "verbs/soft/local/shared_table.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/receive_queue.h"
#include "verbs/soft/token.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

// Shared by its queue pair, the initiator of the process path and the streams of the TCP path, so
// each of them may go first. Whoever touches memory for it is inside its gate meanwhile; the gate
// is idle in INIT, open in RTS and closed in ERR.
class Responder {
  public:
    Responder(std::shared_ptr<const MrTable> mrs, SoftCompletionQueue& recv_cq,
              std::uint32_t qp_num, std::uint32_t max_recv_wr, std::uint8_t min_rnr_timer)
        : token_(random_token()),
          mrs_(std::move(mrs)),
          receives_(recv_cq, qp_num, max_recv_wr),
          min_rnr_timer_(min_rnr_timer) {}

    const Token& token() const noexcept { return token_; }
    const std::shared_ptr<const MrTable>& mrs() const noexcept { return mrs_; }
    Gate& gate() noexcept { return gate_; }
    ReceiveQueue& receives() noexcept { return receives_; }
    std::uint8_t min_rnr_timer() const noexcept { return min_rnr_timer_; }

    // The initiator accept() agreed on: its token and number of streams. Before open().
    void expect(const Token& initiator, std::uint32_t streams) noexcept {
        initiator_ = initiator;
        streams_ = streams;
    }
    std::uint32_t streams() const noexcept { return streams_; }
    bool open() noexcept { return gate_.open(); }

    // Process and local path: true once, for the initiator agreed on.
    bool claim(const Token& initiator) noexcept {
        return gate_.state() == Gate::State::Open && initiator == initiator_ &&
               !claimed_.exchange(true);
    }

    // To ERR, from any thread that is not inside the gate. On return nobody in this process
    // touches memory for this QP any more, and every posted receive has been completed. A guest
    // of another process begins no further copy; its wait_idle() tells when the last one is over.
    void fail() {
        gate_.close();
        if (const auto guest = this->guest()) guest->close();
        receives_.flush();
    }

    // Local path: the initiator that claimed it. False when the gate is closed already.
    bool attach(std::shared_ptr<local::LocalGuest> guest) {
        const std::lock_guard lock(guest_mutex_);
        // Whoever closes the gate after this look finds the guest.
        if (gate_.state() != Gate::State::Open) return false;
        guest_ = std::move(guest);
        return true;
    }
    std::shared_ptr<local::LocalGuest> guest() const {
        const std::lock_guard lock(guest_mutex_);
        return guest_;
    }

  private:
    const Token token_;
    const std::shared_ptr<const MrTable> mrs_;
    Token initiator_{};
    std::uint32_t streams_ = 0;
    Gate gate_{Gate::State::Idle};
    ReceiveQueue receives_;
    const std::uint8_t min_rnr_timer_;
    std::atomic<bool> claimed_{false};  // whether an initiator holds the process or local path
    mutable std::mutex guest_mutex_;    // guards guest_; a leaf
    std::shared_ptr<local::LocalGuest> guest_;
};

}  // namespace aioflagcx::verbs::soft
