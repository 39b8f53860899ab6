// The soft device's QueuePair: an initiator after connect(), a responder after accept().
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "verbs/soft/attributes.h"
#include "verbs/soft/completion_queue.h"
#include "verbs/soft/device_core.h"
#include "verbs/soft/initiator.h"
#include "verbs/soft/memory.h"
#include "verbs/soft/path_choice.h"
#include "verbs/soft/responder.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::soft {

class SoftQueuePair final : public QueuePair {
  public:
    SoftQueuePair(std::shared_ptr<DeviceCore> core, std::shared_ptr<const MrTable> mrs,
                  const QpInit& init);
    ~SoftQueuePair() override;

    std::uint32_t num() const noexcept override { return num_; }
    QpState state() const noexcept override;
    Attributes local_attributes() const override;
    void accept(const Attributes& remote) override;
    void connect(const Attributes& remote, Deadline deadline) override;
    const char* path() const noexcept override { return path_.load(std::memory_order_acquire); }
    std::string path_note() const override { return path_note_; }
    std::size_t post_send(std::span<const SendWr> requests) override;
    void post_recv(std::span<const RecvWr> requests) override;
    bool try_now(const SendWr& request) override;
    void to_error() override;
    bool fence(Deadline deadline) override;

  private:
    enum class Role { None, Accepting, Connecting, Initiator, Responder };

    SoftAttributes own_attributes() const;
    void take_role(Role role, const char* call);
    std::pair<Path, std::unique_ptr<Initiator>> reach_any(const SoftAttributes& responder,
                                                          Deadline deadline);
    std::unique_ptr<Initiator> reach(Path path, const SoftAttributes& remote, Deadline deadline);

    const std::shared_ptr<DeviceCore> core_;
    const std::shared_ptr<const MrTable> mrs_;
    SoftCompletionQueue& send_cq_;
    SoftCompletionQueue& recv_cq_;
    const QpInit init_;
    const std::uint32_t num_;
    // Holds the posted receives of either role; its gate opens only in a responder.
    const std::shared_ptr<Responder> responder_;

    // Guards role_ and the change of initiator_ and path_ against fence() and to_error() while
    // accept() or connect() runs. Not held while connect() waits. Taken before any other lock.
    mutable std::mutex setup_mutex_;
    Role role_ = Role::None;
    std::unique_ptr<Initiator> initiator_;
    // initiator_ for those who do not take setup_mutex_; set once.
    std::atomic<Initiator*> connected_{nullptr};
    std::atomic<const char*> path_{""};
    std::string path_note_;  // written by connect() only
};

}  // namespace aioflagcx::verbs::soft
