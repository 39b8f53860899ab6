// The pieces of one transfer, in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "engine/block_layout.h"
#include "engine/local_table.h"
#include "engine/remote_table.h"

namespace aioflagcx::engine {

// Consecutive bytes of one local and one remote region.
struct Piece {
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
    std::uint64_t length = 0;
    const LocalRegion* local_region = nullptr;
    const TableRecord* remote_region = nullptr;
};

// One span of a layout and the blocks of it that are moved.
struct BlockRow {
    const BlockSpan* span = nullptr;  // of `layout`
    std::shared_ptr<const BlockLayout> layout;
    std::shared_ptr<const BlockIds> ids;
    const LocalRegion* local_region = nullptr;
    const TableRecord* remote_region = nullptr;

    std::size_t pieces() const noexcept {
        return span->dense() ? ids->runs.size() : ids->blocks.size() * span->repeats;
    }
    Piece at(std::size_t index) const noexcept;
};

// Immutable once built. Blocks are expanded as they are asked for: a cache of 61 layers and 4,096
// blocks would be ten megabytes of pieces, and its caller would have to wait for them.
class Pieces {
  public:
    explicit Pieces(std::vector<Piece> list) : list_(std::move(list)), size_(list_.size()) {}
    // Each row has pieces.
    explicit Pieces(std::vector<BlockRow> rows);

    std::size_t size() const noexcept { return size_; }
    Piece operator[](std::size_t index) const noexcept;

    // The first that goes to or comes from a region of the peer's with one of these flags.
    std::optional<Piece> first_into(std::uint32_t flags) const noexcept;

  private:
    std::vector<Piece> list_;
    std::vector<BlockRow> rows_;       // if there are any, there is no list
    std::vector<std::size_t> starts_;  // of the rows: the index of each one's first piece
    std::size_t size_;
};

}  // namespace aioflagcx::engine
