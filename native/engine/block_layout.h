// How the blocks of two pools lie, here and at the peer, and which of them a transfer moves.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace aioflagcx::engine {

// What one pool has of each block, on both sides: `repeats` pieces of `length` bytes, a step apart.
// Block i begins i strides behind the base.
struct BlockSpan {
    std::uint64_t src = 0;  // here
    std::uint64_t dst = 0;  // at the peer
    std::uint64_t length = 0;
    std::uint64_t src_stride = 0;
    std::uint64_t dst_stride = 0;
    std::uint64_t repeats = 1;
    std::uint64_t src_step = 0;
    std::uint64_t dst_step = 0;

    // Bytes from the beginning of a block's first piece to the end of its last.
    std::uint64_t src_extent() const noexcept { return (repeats - 1) * src_step + length; }
    std::uint64_t dst_extent() const noexcept { return (repeats - 1) * dst_step + length; }

    // Consecutive blocks are consecutive bytes, on both sides.
    bool dense() const noexcept {
        return repeats == 1 && src_stride == length && dst_stride == length;
    }
};

// Immutable once built, and then known to hold: no address of it passes 2^63, blocks of a pool do
// not overlap.
class BlockLayout {
  public:
    // Throws std::invalid_argument naming the span's index.
    BlockLayout(std::vector<BlockSpan> spans, std::uint64_t src_blocks, std::uint64_t dst_blocks);

    const std::vector<BlockSpan>& spans() const noexcept { return spans_; }
    std::uint64_t src_blocks() const noexcept { return src_blocks_; }
    std::uint64_t dst_blocks() const noexcept { return dst_blocks_; }
    // Bytes that are moved for one block.
    std::uint64_t block_bytes() const noexcept { return block_bytes_; }

    // Bytes of a span's pool.
    std::uint64_t src_pool(const BlockSpan& span) const noexcept {
        return (src_blocks_ - 1) * span.src_stride + span.src_extent();
    }
    std::uint64_t dst_pool(const BlockSpan& span) const noexcept {
        return (dst_blocks_ - 1) * span.dst_stride + span.dst_extent();
    }

  private:
    std::vector<BlockSpan> spans_;
    std::uint64_t src_blocks_;
    std::uint64_t dst_blocks_;
    std::uint64_t block_bytes_ = 0;
};

// `count` blocks from there on, one after another on both sides.
struct BlockRun {
    std::uint64_t src = 0;
    std::uint64_t dst = 0;
    std::uint64_t count = 1;
};

// The blocks of one layout that are moved, as they are and merged.
struct BlockIds {
    std::vector<BlockRun> blocks;  // each of count 1
    std::vector<BlockRun> runs;

    void add(std::uint64_t src, std::uint64_t dst);
};

}  // namespace aioflagcx::engine
