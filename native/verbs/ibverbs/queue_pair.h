// A reliable connected queue pair.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <span>
#include <vector>

#include "verbs/ibverbs/address.h"
#include "verbs/ibverbs/completion_queue.h"
#include "verbs/ibverbs/handles.h"
#include "verbs/ibverbs/ibverbs.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

// What a port's queue pairs share.
struct Port {
    std::shared_ptr<ibv_context> context;
    IbverbsOptions options;
    Address address;  // without what belongs to one queue pair
    std::uint8_t gid_index = 0;
    std::uint32_t max_rd_atomic = 1;       // reads a queue pair may have under way
    std::uint32_t max_dest_rd_atomic = 1;  // and answer at once
};

// Requests of one posting share a signal: only the last of it asks for an entry in the completion
// queue, which then stands for those before it as well, since they complete in order.
//
// Lock: mutex_ guards everything declared below it; a leaf.
class IbvQueuePair final : public QueuePair {
  public:
    IbvQueuePair(std::shared_ptr<const Port> port, std::shared_ptr<ibv_pd> pd, const QpInit& init);
    ~IbvQueuePair() override;

    std::uint32_t num() const noexcept override { return num_; }
    QpState state() const noexcept override;
    Attributes local_attributes() const override;
    void accept(const Attributes& remote) override;
    void connect(const Attributes& remote, Deadline deadline) override;
    const char* path() const noexcept override { return "ibverbs"; }
    std::size_t post_send(std::span<const SendWr> requests) override;
    void post_recv(std::span<const RecvWr> requests) override;
    void to_error() override;
    bool fence(Deadline deadline) override;

    // One entry of the completion queue, and what it stands for.
    void complete(const ibv_wc& wc, std::deque<WorkCompletion>& out);

  private:
    struct Posted {
        std::uint64_t wr_id = 0;
        WcOpcode opcode = WcOpcode::Send;
        bool signaled = true;  // as the poster wants it
    };

    void to_init();
    void to_rts(const Address& remote);
    void modify(ibv_qp_attr& attributes, int mask, const char* step);
    std::size_t post_chain(std::size_t count);
    int go_to_error() noexcept;  // with mutex_ held
    void destroy() noexcept;
    bool responder() const noexcept;
    void complete_send(const ibv_wc& wc, std::deque<WorkCompletion>& out);
    void complete_receive(const ibv_wc& wc, std::deque<WorkCompletion>& out);

    const std::shared_ptr<const Port> port_;
    const std::shared_ptr<ibv_pd> pd_;  // outlives qp_
    IbvCompletionQueue& send_cq_;
    IbvCompletionQueue& recv_cq_;
    const QpInit init_;
    const std::uint32_t psn_;
    std::uint32_t max_inline_ = 0;
    mutable std::mutex mutex_;
    Handle<ibv_qp> qp_;  // null once it has been fenced
    const std::uint32_t num_;
    bool is_responder_ = false;
    QpState state_ = QpState::Reset;
    // Posted and not yet complete, by number modulo the depth.
    std::vector<Posted> sends_;
    std::uint64_t send_head_ = 0;
    std::uint64_t send_tail_ = 0;
    std::vector<std::uint64_t> receives_;
    std::uint64_t recv_head_ = 0;
    std::uint64_t recv_tail_ = 0;
    // Scratch of post_send().
    std::vector<ibv_send_wr> chain_;
    std::vector<ibv_sge> sges_;
};

}  // namespace aioflagcx::verbs::ibverbs
