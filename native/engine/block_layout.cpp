#include "engine/block_layout.h"

#include <stdexcept>
#include <string>
#include <utility>

namespace aioflagcx::engine {

namespace {

__extension__ using Wide = unsigned __int128;

constexpr Wide kEnd = Wide{1} << 63;  // no address, and no sum of lengths, passes it

[[noreturn]] void refuse(std::size_t index, const std::string& problem) {
    throw std::invalid_argument("spans[" + std::to_string(index) + "] " + problem);
}

// One side of a span.
struct Side {
    const char* name;
    std::uint64_t base;
    std::uint64_t stride;
    std::uint64_t step;
    std::uint64_t blocks;
};

void check(std::size_t index, const BlockSpan& span, const Side& side) {
    if (span.repeats > 1 && side.step < span.length) {
        refuse(index, "has a " + std::string(side.name) + "_step of " + std::to_string(side.step) +
                          " bytes for pieces of " + std::to_string(span.length));
    }
    const Wide extent = Wide{span.repeats - 1} * side.step + span.length;
    if (extent > kEnd) refuse(index, "is larger than 2**63 bytes");
    if (side.blocks > 1 && side.stride < extent) {
        refuse(index, "has a " + std::string(side.name) + "_stride of " +
                          std::to_string(side.stride) + " bytes for blocks of " +
                          std::to_string(static_cast<std::uint64_t>(extent)));
    }
    // Two steps, each of which fits: a product of three values would not.
    const Wide pool = Wide{side.blocks - 1} * side.stride;
    if (pool > kEnd || side.base + pool + extent > kEnd) {
        refuse(index, "reaches over 2**63: " + std::string(side.name) + " " +
                          std::to_string(side.base) + " + " + std::to_string(side.blocks) +
                          " blocks, " + std::to_string(side.stride) + " bytes apart");
    }
}

}  // namespace

BlockLayout::BlockLayout(std::vector<BlockSpan> spans, std::uint64_t src_blocks,
                         std::uint64_t dst_blocks)
    : spans_(std::move(spans)), src_blocks_(src_blocks), dst_blocks_(dst_blocks) {
    if (src_blocks == 0 || dst_blocks == 0) {
        throw std::invalid_argument("a layout needs at least one block on either side, not " +
                                    std::to_string(src_blocks) + " and " +
                                    std::to_string(dst_blocks));
    }
    Wide bytes = 0;
    for (std::size_t i = 0; i < spans_.size(); ++i) {
        BlockSpan& span = spans_[i];
        if (span.length == 0) refuse(i, "has a length of 0");
        if (span.repeats == 0) refuse(i, "has 0 repeats");
        check(i, span, {"src", span.src, span.src_stride, span.src_step, src_blocks});
        check(i, span, {"dst", span.dst, span.dst_stride, span.dst_step, dst_blocks});
        // Pieces that touch each other on both sides are one.
        if (span.src_step == span.length && span.dst_step == span.length) {
            span.length *= span.repeats;
            span.repeats = 1;
        }
        bytes += Wide{span.repeats} * span.length;
    }
    if (bytes > kEnd) throw std::invalid_argument("a block of all spans has more than 2**63 bytes");
    block_bytes_ = static_cast<std::uint64_t>(bytes);
}

void BlockIds::add(std::uint64_t src, std::uint64_t dst) {
    blocks.push_back({src, dst});
    if (!runs.empty()) {
        BlockRun& last = runs.back();
        if (last.src + last.count == src && last.dst + last.count == dst) {
            ++last.count;
            return;
        }
    }
    runs.push_back({src, dst});
}

}  // namespace aioflagcx::engine
