// The native countdown of a transfer's slices.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "engine/epoch.h"
#include "engine/event_ring.h"
#include "engine/pieces.h"
#include "engine/request.h"
#include "engine/waiter.h"

namespace aioflagcx::engine {

class Lane;
class TransferTask;

// At most slice_size bytes of one transfer, or one of its closing requests: one work request.
struct Slice {
    std::shared_ptr<TransferTask> task;
    const LocalRegion* local_region = nullptr;  // null: a closing request
    const TableRecord* remote_region = nullptr;
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
    std::uint32_t length = 0;

    bool is_closing() const noexcept { return local_region == nullptr; }
};

// Everything not const or atomic is guarded by the mutex of the TransferQueue that has the task.
class TransferTask {
  public:
    TransferTask(std::uint64_t id_, Op op_, std::uint32_t imm_, Pieces pieces_, RegionUses uses_,
                 std::shared_ptr<const RemoteTable> remote_, std::uint64_t bytes_total_)
        : id(id_),
          op(op_),
          imm(imm_),
          bytes_total(bytes_total_),
          remote(std::move(remote_)),
          pieces(std::move(pieces_)),
          confirmed(to_confirm(op_, imm_, pieces)),
          uses(std::move(uses_)) {}

    const std::uint64_t id;
    const Op op;
    const std::uint32_t imm;  // 0: no notify
    const std::uint64_t bytes_total;
    const std::shared_ptr<const RemoteTable> remote;  // keeps the pieces' regions alive
    const Pieces pieces;
    // Data that is visible to the peer only once a read has followed it; none: there is no such, or
    // the immediates see to it.
    const std::optional<Piece> confirmed;
    std::atomic<std::uint64_t> bytes_done{0};
    std::atomic<std::uint32_t> imm_count{0};

    RegionUses uses;  // released when finished
    // Where a thread waits for its success; null: that goes to the event ring, as failure does.
    std::shared_ptr<Waiter> waiter;

    // The cursor: slices not cut yet.
    std::size_t next_piece = 0;
    std::uint64_t next_offset = 0;
    std::vector<Slice> again;  // of unknown outcome, to be posted once more

    std::uint32_t posted = 0;          // slices and closing requests that a lane holds
    bool queued = false;               // in the queue's ring of runnable tasks
    bool dropped = false;              // nothing more is posted; ends when posted is 0
    bool finished = false;             // reported
    std::vector<Epoch> failed_epochs;  // by their path, with slices of it on them
    std::vector<Lane*> used;           // lanes that carried data of it; for comparison only

    // When all data has completed, a closing request goes out on each lane used: the immediate of
    // a notification, or else a read of a byte that makes the data visible to the peer.
    bool closing_started = false;
    std::uint32_t closing_waiting = 0;  // in lanes' queues of them
    std::uint32_t closing_missing = 0;  // not acknowledged yet
    bool closing_failed = false;        // one was flushed: all are sent once more

    // Epochs whose slices were posted again: success counts only once they are fenced.
    std::vector<Epoch> fences;
    TransferEvent failure;  // why it was dropped

    bool has_data() const noexcept { return !again.empty() || next_piece < pieces.size(); }
    bool has_closing() const noexcept { return imm != 0 || confirmed; }

  private:
    static std::optional<Piece> to_confirm(Op op, std::uint32_t imm,
                                           const Pieces& pieces) noexcept {
        if (op != Op::Write || imm != 0) return std::nullopt;
        return pieces.first_into(kTableReadAfterWrite);
    }
};

}  // namespace aioflagcx::engine
