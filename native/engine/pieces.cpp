#include "engine/pieces.h"

#include <algorithm>
#include <utility>

namespace aioflagcx::engine {

Piece BlockRow::at(std::size_t index) const noexcept {
    const bool merged = span->dense();
    const BlockRun& run = merged ? ids->runs[index] : ids->blocks[index / span->repeats];
    const std::uint64_t repeat = merged ? 0 : index % span->repeats;
    return {span->src + run.src * span->src_stride + repeat * span->src_step,
            span->dst + run.dst * span->dst_stride + repeat * span->dst_step,
            span->length * run.count, local_region, remote_region};
}

Pieces::Pieces(std::vector<BlockRow> rows) : rows_(std::move(rows)), size_(0) {
    starts_.reserve(rows_.size());
    for (const BlockRow& row : rows_) {
        starts_.push_back(size_);
        size_ += row.pieces();
    }
}

Piece Pieces::operator[](std::size_t index) const noexcept {
    if (rows_.empty()) return list_[index];
    const auto next = std::upper_bound(starts_.begin(), starts_.end(), index);
    const auto row = static_cast<std::size_t>(next - starts_.begin()) - 1;
    return rows_[row].at(index - starts_[row]);
}

std::optional<Piece> Pieces::first_into(std::uint32_t flags) const noexcept {
    const auto has = [flags](const auto& one) { return (one.remote_region->flags & flags) != 0; };
    if (const auto row = std::find_if(rows_.begin(), rows_.end(), has); row != rows_.end()) {
        return row->at(0);
    }
    const auto piece = std::find_if(list_.begin(), list_.end(), has);
    return piece == list_.end() ? std::nullopt : std::optional(*piece);
}

}  // namespace aioflagcx::engine
