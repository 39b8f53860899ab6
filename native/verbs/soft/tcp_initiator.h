// The TCP path: spreads a QP's requests over its streams.
#pragma once

#include <memory>
#include <vector>

#include "verbs/soft/initiator.h"
#include "verbs/soft/send_stream.h"

namespace aioflagcx::verbs::soft {

// Has no thread: the completion queue's poll() and post_send() do all the work.
class TcpInitiator final : public Initiator, public StreamOwner {
  public:
    // `streams` are connected and bound by the responder.
    TcpInitiator(const Init& init, std::vector<UniqueFd> streams);
    ~TcpInitiator() override { detach(); }

  private:
    void pump() override;
    void receive() override;
    void close_path() noexcept override;

    void stream_ready() noexcept override { cq_.mark_ready(*this); }
    void receiver_not_ready(std::uint8_t min_rnr_timer) override { not_ready(min_rnr_timer); }

    // Sends what is begun and begins what may start, at most `budget` bytes.
    void move(std::size_t& budget);
    // Fills the stream's frame with what may start. False when a local error ended the QP.
    bool fill(SendStream& stream);
    // The stream that may take the next frame with the least to do, or null.
    SendStream* pick() noexcept;
    bool settle(const std::optional<StreamFailure>& failure);

    std::vector<std::unique_ptr<SendStream>> streams_;
};

}  // namespace aioflagcx::verbs::soft
