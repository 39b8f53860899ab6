// One transfer's pieces, before anything moves: checked, copied, resolved to regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/block_layout.h"
#include "engine/local_table.h"
#include "engine/pieces.h"
#include "engine/remote_table.h"

namespace aioflagcx::engine {

enum class Op : std::uint8_t { Write = 0, Read = 1 };

// 64-bit integers owned by the caller, as they come from numpy.
struct IntArray {
    const void* data = nullptr;
    std::size_t count = 0;
    bool is_signed = false;
};

// A piece, or a whole pool of blocks, that lies in no single region that grants the access.
class AddressMiss : public std::runtime_error {
  public:
    AddressMiss(bool remote, std::size_t index, std::uint64_t address, std::uint64_t length);

    bool remote;
    std::size_t index;  // in the caller's arrays; of blocks, the span's in all layouts together
    std::uint64_t address;
    std::uint64_t length;
};

// Blocks of one layout: those of `src` here, which go to those of `dst` at the peer.
struct BlockMove {
    std::shared_ptr<const BlockLayout> layout;
    IntArray src;
    IntArray dst;
};

// The regions a transfer uses, counted in LocalRegion::users until release().
class RegionUses {
  public:
    explicit RegionUses(std::shared_ptr<LocalTable> table) : table_(std::move(table)) {}
    RegionUses(RegionUses&&) noexcept = default;
    RegionUses& operator=(RegionUses&& other) noexcept {
        std::swap(table_, other.table_);
        std::swap(regions_, other.regions_);
        return *this;
    }
    RegionUses(const RegionUses&) = delete;
    RegionUses& operator=(const RegionUses&) = delete;
    ~RegionUses() { release(); }

    // False: the region has been revoked.
    bool add(const std::shared_ptr<LocalRegion>& region);
    void release() noexcept;

  private:
    std::shared_ptr<LocalTable> table_;
    std::vector<std::shared_ptr<LocalRegion>> regions_;
};

class Request {
  public:
    // `lens` may have one element, which then holds for all pieces. Throws std::invalid_argument
    // or AddressMiss, both naming the index.
    Request(std::shared_ptr<LocalTable> table, Op op, IntArray local, IntArray remote,
            IntArray lens);

    // A write of blocks. The pools of all spans must lie in regions, whichever blocks are moved: so
    // this takes as long as there are spans and blocks, not as long as their product. Throws as
    // above.
    Request(std::shared_ptr<LocalTable> table, const std::vector<BlockMove>& moves);

    Op op() const noexcept { return op_; }
    std::uint64_t bytes_total() const noexcept { return bytes_total_; }
    std::size_t pieces() const noexcept { return raw_.size() + rows_.size(); }

    // Neighbours that continue each other on both sides and lie in the same pair of regions are
    // merged. Throws AddressMiss; the request stays usable. Throws std::invalid_argument when it is
    // spent: nothing keeps its regions any more.
    Pieces resolve(const RemoteTable& remote) const;

    // The transfer takes the uses over; the request is then spent.
    RegionUses take_uses() {
        spent_ = true;
        return std::move(uses_);
    }
    // The transfer did not come about.
    void return_uses(RegionUses uses) noexcept {
        uses_ = std::move(uses);
        spent_ = false;
    }
    void release() noexcept {
        spent_ = true;
        uses_.release();
    }

  private:
    struct RawPiece {
        std::uint64_t local;
        std::uint64_t remote;
        std::uint64_t length;
        const LocalRegion* region;
        std::size_t index;
    };

    void find_local();
    void find_local_pools();
    std::vector<Piece> resolve_list(const RemoteTable& remote) const;
    std::vector<BlockRow> resolve_rows(const RemoteTable& remote) const;

    Op op_;
    std::shared_ptr<LocalTable> table_;
    std::vector<RawPiece> raw_;
    std::vector<BlockRow> rows_;  // with pieces, of blocks; then there is nothing in raw_
    std::uint64_t bytes_total_ = 0;
    RegionUses uses_;
    bool spent_ = false;
};

}  // namespace aioflagcx::engine
