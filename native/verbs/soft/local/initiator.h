// The local path: the target is a process of this host whose memory this one may copy.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

#include "verbs/soft/initiator.h"
#include "verbs/soft/local/connection.h"
#include "verbs/soft/local/guarded_copy.h"
#include "verbs/soft/send_stream.h"

namespace aioflagcx::verbs::soft::local {

// Writes and reads are copied inside post_send() and poll(), on the worker's thread, by system
// calls that reach into the target (process_vm_writev(2)) or by plain stores where its memory is
// mapped here; the target runs no code for them. Requests that need a receive of the target go by
// a stream, as on the TCP path.
class LocalInitiator final : public Initiator, public StreamOwner {
  public:
    LocalInitiator(const Init& init, std::unique_ptr<Connection> connection);
    ~LocalInitiator() override { detach(); }

  private:
    // Notes that the target has sent something, or that its process has ended.
    class Watch final : public EventSink {
      public:
        explicit Watch(LocalInitiator& owner) noexcept : owner_(owner) {}
        void on_events(std::uint32_t) noexcept override {
            pending = true;
            owner_.cq_.mark_ready(owner_);
        }
        bool pending = false;

      private:
        LocalInitiator& owner_;
    };

    // A region of the target, as its table has it while its key is announced.
    struct Remote {
        std::uint64_t addr;
        std::uint64_t length;
        std::uint8_t* window;  // where it is mapped here, or null

        bool covers(std::uint64_t start, std::uint64_t size) const noexcept {
            return start >= addr && size <= length && start - addr <= length - size;
        }
    };

    void pump() override;
    bool execute_now(const SendWr& wr) override;
    void receive() override;
    void close_path() noexcept override;
    void stream_ready() noexcept override { cq_.mark_ready(*this); }
    void receiver_not_ready(std::uint8_t min_rnr_timer) override { not_ready(min_rnr_timer); }

    // Each of these is false when the QP went to ERR.
    bool send_alone();
    bool copy_run();
    bool copy_chunk(std::uint64_t end);
    bool settle(const std::optional<StreamFailure>& failure);

    std::uint64_t start_run();
    // The steps of copy_chunk(), each on the first pieces that the one before let pass.
    std::size_t gather(std::uint64_t end, PinSet& pins);
    void announce() noexcept;
    void withdraw() noexcept;
    std::size_t check_remote(std::size_t count);
    std::optional<Remote> find_remote(std::uint32_t key);
    bool copy(const Guard& guard, std::size_t count, std::size_t* copied, int* error);
    void finish_copied(std::size_t bytes);
    bool fail_copy(int error);

    std::unique_ptr<Connection> connection_;  // null once the path is closed
    SendStream stream_;
    Watch control_{*this};
    Watch process_{*this};

    // The run being copied: started requests of one opcode.
    bool reading_ = false;
    std::uint64_t first_ = 0;   // the first that is not finished
    std::uint64_t offset_ = 0;  // bytes of it that have been copied
    // One copy of it: pieces of consecutive requests from there on, here and in the target; where
    // the target's bytes are mapped here, or null; and the keys that name them.
    std::array<iovec, kCallPieces> here_;
    std::array<iovec, kCallPieces> there_;
    std::array<std::uint8_t*, kCallPieces> mapped_;
    std::array<std::uint32_t, kAnnouncedKeys> keys_;
    std::size_t key_count_ = 0;
};

}  // namespace aioflagcx::verbs::soft::local
