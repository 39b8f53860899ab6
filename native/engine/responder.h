// The target's side of one control connection: the queue pairs its initiator writes through.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <vector>

#include "engine/liveness.h"
#include "engine/worker.h"
#include "verbs/verbs.h"

namespace aioflagcx::engine {

class TransferEngine;
class Responder;

// The receive side of one responder queue pair: takes immediates, posts receives again.
class ReceiveSink final : public CompletionSink {
  public:
    ReceiveSink(Worker& worker, std::weak_ptr<Responder> responder)
        : worker_(worker), responder_(std::move(responder)) {}

    void on_completion(std::uint32_t slot, const verbs::WorkCompletion& wc) override;
    bool serve() override { return false; }

    Worker& worker() noexcept { return worker_; }
    void set_queue_pair(std::shared_ptr<verbs::QueuePair> qp) { qp_ = std::move(qp); }
    void post_receives(std::uint32_t count);

  private:
    Worker& worker_;
    std::weak_ptr<Responder> responder_;
    std::shared_ptr<verbs::QueuePair> qp_;
};

// Locks, never held together: mutex_ guards the queue pairs and `closed_` (held while fencing,
// which waits for the device's own threads only, and never for the peer); imm_mutex_ guards the
// immediates.
class Responder : public std::enable_shared_from_this<Responder> {
  public:
    Responder(std::shared_ptr<TransferEngine> engine, std::uint64_t id, std::string peer);
    ~Responder();  // close(), without waiting

    std::uint64_t id() const noexcept { return id_; }
    const KeepaliveToken& keepalive_token() const noexcept { return token_; }
    std::string path();

    // Starts to expect the initiator's keepalive; once, right after construction.
    void expect_keepalive(Liveness::Seconds interval, Liveness::Seconds timeout);

    // One reply for each of `remote`. A rail of which a queue pair cannot be is refused as a whole:
    // its replies say why. Throws NativeError when the request itself makes no sense.
    std::vector<verbs::Attributes> accept(std::uint64_t attempt,
                                          const std::vector<verbs::Attributes>& remote);
    // False at the deadline: the peer is stopped inside a copy. It can begin no other; call again
    // to wait on.
    bool fence(std::uint64_t attempt, std::uint64_t rail, verbs::Deadline deadline);
    // The same for all epochs there are; the keepalive goes on.
    bool fence_all(verbs::Deadline deadline);
    bool close(verbs::Deadline deadline);
    // After close(): frees the queue pairs that no confirmation came for, as their device goes.
    void abandon();

    bool expect(std::uint32_t imm, std::uint32_t count);
    void forget(std::uint32_t imm);
    void on_immediate(std::uint32_t imm);

  private:
    struct Accepted {
        std::uint64_t attempt = 0;
        std::uint64_t rail = 0;
        std::shared_ptr<verbs::QueuePair> qp;
        std::shared_ptr<ReceiveSink> sink;
    };

    std::uint32_t device_of(const verbs::Attributes& remote) const;
    Accepted accept_one(std::uint64_t attempt, std::uint32_t device,
                        const verbs::Attributes& remote, verbs::Attributes* local);
    void accept_rail(std::uint64_t attempt, std::uint64_t rail, std::uint32_t device,
                     const std::vector<verbs::Attributes>& remote,
                     std::vector<verbs::Attributes>& reply);
    void release(std::vector<Accepted> accepted);
    template <typename Predicate>
    bool wait_quiet(Predicate matches, verbs::Deadline deadline);
    template <typename Predicate>
    void fence_if(Predicate matches);
    void lost(const std::string& reason);

    const std::shared_ptr<TransferEngine> engine_;
    const std::uint64_t id_;
    const std::string peer_;
    KeepaliveToken token_;

    std::mutex mutex_;
    std::vector<Accepted> accepted_;
    std::vector<Accepted> unquiet_;  // fenced, not confirmed; without their sinks
    std::string path_;
    bool closed_ = false;

    std::mutex imm_mutex_;
    std::unordered_map<std::uint32_t, std::uint32_t> arrived_;   // imm -> count, nobody asked yet
    std::deque<std::uint32_t> arrival_order_;                    // of arrived_'s keys
    std::unordered_map<std::uint32_t, std::uint32_t> expected_;  // imm -> how many are missing
};

}  // namespace aioflagcx::engine
