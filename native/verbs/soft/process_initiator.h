// The process path: initiator and target share the address space, so a request is a copy.
#pragma once

#include <memory>
#include <optional>

#include "verbs/soft/initiator.h"
#include "verbs/soft/responder.h"

namespace aioflagcx::verbs::soft {

// Requests are carried out inside post_send(), on the worker's thread.
class ProcessInitiator final : public Initiator {
  public:
    ProcessInitiator(const Init& init, std::shared_ptr<Responder> target)
        : Initiator(init), target_(std::move(target)), target_mrs_(target_->mrs()) {}
    ~ProcessInitiator() override { detach(); }

  private:
    void pump() override;
    bool execute_now(const SendWr& wr) override { return execute(wr) == WcStatus::Success; }
    // No copy is under way between calls. The responder of an initiator that left is of no use to
    // anybody, and learns it as it would from the end of a TCP stream.
    void close_path() noexcept override { target_->fail(); }

    // The status, or nothing when the receiver is not ready.
    std::optional<WcStatus> execute(const SendWr& wr);
    std::optional<WcStatus> send(const SendWr& wr);
    std::optional<WcStatus> take_immediate(const SendWr& wr);
    WcStatus copy(const SendWr& wr, std::uint32_t remote_key, std::uint64_t remote_addr,
                  std::uint32_t remote_access);

    const std::shared_ptr<Responder> target_;
    MrCache target_mrs_;
};

}  // namespace aioflagcx::verbs::soft
