#include "engine/request.h"

#include <algorithm>
#include <cstring>
#include <unordered_set>
#include <utility>

namespace aioflagcx::engine {

namespace {

constexpr std::uint64_t kMaxValue = 1ull << 63;

[[noreturn]] void refuse(const char* what, std::size_t index, const std::string& problem) {
    throw std::invalid_argument(std::string(what) + "[" + std::to_string(index) + "] " + problem);
}

std::uint64_t value_at(const IntArray& array, std::size_t i, const char* what) {
    std::uint64_t value = 0;
    std::memcpy(&value, static_cast<const std::uint8_t*>(array.data) + 8 * i, sizeof value);
    if (array.is_signed && (value >> 63) != 0) {
        refuse(what, i, "is negative: " + std::to_string(static_cast<std::int64_t>(value)));
    }
    if (value > kMaxValue) refuse(what, i, "is over 2**63: " + std::to_string(value));
    return value;
}

void check_end(const char* what, std::size_t i, std::uint64_t addr, std::uint64_t length) {
    if (length != 0 && addr + (length - 1) < addr) {
        refuse(what, i,
               "plus its length passes 2**64: " + std::to_string(addr) + " + " +
                   std::to_string(length));
    }
}

std::uint64_t block_at(const IntArray& ids, std::size_t i, const std::string& what,
                       std::uint64_t blocks) {
    const std::uint64_t id = value_at(ids, i, what.c_str());
    if (id >= blocks) {
        refuse(what.c_str(), i,
               "= " + std::to_string(id) + " is not below the pool's " + std::to_string(blocks) +
                   " blocks");
    }
    return id;
}

BlockIds block_ids(const BlockMove& move, const std::string& which) {
    const std::string src = "src_blocks" + which;
    const std::string dst = "dst_blocks" + which;
    if (move.src.count != move.dst.count) {
        throw std::invalid_argument(src + " has " + std::to_string(move.src.count) + " elements, " +
                                    dst + " " + std::to_string(move.dst.count));
    }
    BlockIds ids;
    ids.blocks.reserve(move.src.count);
    for (std::size_t i = 0; i < move.src.count; ++i) {
        ids.add(block_at(move.src, i, src, move.layout->src_blocks()),
                block_at(move.dst, i, dst, move.layout->dst_blocks()));
    }
    return ids;
}

// Looks pieces up in our regions; each region that it finds is used once.
class LocalFinder {
  public:
    LocalFinder(const LocalTable::Snapshot& snapshot, RegionUses& uses, std::uint32_t need)
        : snapshot_(snapshot), uses_(uses), need_(need) {}

    const LocalRegion* find(std::uint64_t addr, std::uint64_t length, std::size_t index) {
        hint_ = snapshot_.index.find(addr, length, need_, hint_);
        if (hint_ == AddressIndex::kNone) throw AddressMiss(false, index, addr, length);
        const auto& region = snapshot_.regions[hint_];
        if (hint_ != last_used_ && used_.insert(hint_).second && !uses_.add(region)) {
            throw AddressMiss(false, index, addr, length);  // being deregistered
        }
        last_used_ = hint_;
        return region.get();
    }

  private:
    const LocalTable::Snapshot& snapshot_;
    RegionUses& uses_;
    const std::uint32_t need_;
    std::unordered_set<std::size_t> used_;
    std::size_t hint_ = AddressIndex::kNone;
    std::size_t last_used_ = AddressIndex::kNone;
};

}  // namespace

AddressMiss::AddressMiss(bool remote_side, std::size_t at, std::uint64_t addr, std::uint64_t len)
    : std::runtime_error("piece " + std::to_string(at) + " at address " + std::to_string(addr) +
                         ", " + std::to_string(len) + " bytes, lies in no single " +
                         (remote_side ? "remote" : "local") + " region that grants the access"),
      remote(remote_side),
      index(at),
      address(addr),
      length(len) {}

bool RegionUses::add(const std::shared_ptr<LocalRegion>& region) {
    regions_.push_back(region);  // first: it may throw
    return LocalTable::acquire(*region);
}

void RegionUses::release() noexcept {
    for (const auto& region : regions_) table_->release(*region);
    regions_.clear();
}

Request::Request(std::shared_ptr<LocalTable> table, Op op, IntArray local, IntArray remote,
                 IntArray lens)
    : op_(op), table_(table), uses_(std::move(table)) {
    const std::size_t count = local.count;
    if (remote.count != count) {
        throw std::invalid_argument("local has " + std::to_string(count) + " elements, remote " +
                                    std::to_string(remote.count));
    }
    if (lens.count != count && lens.count != 1) {
        throw std::invalid_argument("lens has " + std::to_string(lens.count) + " elements for " +
                                    std::to_string(count) + " pieces");
    }
    raw_.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
        const std::uint64_t length = value_at(lens, lens.count == 1 ? 0 : i, "lens");
        const std::uint64_t from = value_at(local, i, "local");
        const std::uint64_t to = value_at(remote, i, "remote");
        check_end("local", i, from, length);
        check_end("remote", i, to, length);
        if (length == 0) continue;
        if (bytes_total_ + length < bytes_total_) refuse("lens", i, "makes the sum pass 2**64");
        bytes_total_ += length;
        raw_.push_back({from, to, length, nullptr, i});
    }
    find_local();
}

Request::Request(std::shared_ptr<LocalTable> table, const std::vector<BlockMove>& moves)
    : op_(Op::Write), table_(table), uses_(std::move(table)) {
    for (std::size_t m = 0; m < moves.size(); ++m) {
        const BlockMove& move = moves[m];
        const std::string which =
            moves.size() == 1 ? "" : std::string("[") + std::to_string(m) + "]";
        auto ids = std::make_shared<const BlockIds>(block_ids(move, which));
        const std::size_t count = ids->blocks.size();
        if (count == 0 || move.layout->spans().empty()) continue;
        if (count > (kMaxValue - bytes_total_) / move.layout->block_bytes()) {
            throw std::invalid_argument("src_blocks" + which + " makes the sum pass 2**63 bytes");
        }
        bytes_total_ += count * move.layout->block_bytes();
        for (const BlockSpan& span : move.layout->spans()) {
            rows_.push_back({&span, move.layout, ids, nullptr, nullptr});
        }
    }
    find_local_pools();
}

void Request::find_local() {
    const auto snapshot = table_->snapshot();
    LocalFinder finder(*snapshot, uses_, op_ == Op::Read ? kLocalWritable : 0);
    for (RawPiece& piece : raw_) {
        piece.region = finder.find(piece.local, piece.length, piece.index);
    }
}

void Request::find_local_pools() {
    const auto snapshot = table_->snapshot();
    LocalFinder finder(*snapshot, uses_, 0);
    for (std::size_t i = 0; i < rows_.size(); ++i) {
        BlockRow& row = rows_[i];
        row.local_region = finder.find(row.span->src, row.layout->src_pool(*row.span), i);
    }
}

Pieces Request::resolve(const RemoteTable& remote) const {
    if (spent_) throw std::invalid_argument("the request has been submitted or released");
    return rows_.empty() ? Pieces(resolve_list(remote)) : Pieces(resolve_rows(remote));
}

std::vector<Piece> Request::resolve_list(const RemoteTable& remote) const {
    std::vector<Piece> pieces;
    pieces.reserve(raw_.size());
    const std::uint32_t need = op_ == Op::Write ? kTableAccessWrite : kTableAccessRead;
    std::size_t hint = AddressIndex::kNone;
    for (const RawPiece& raw : raw_) {
        hint = remote.index().find(raw.remote, raw.length, need, hint);
        if (hint == AddressIndex::kNone) {
            throw AddressMiss(true, raw.index, raw.remote, raw.length);
        }
        const TableRecord* region = &remote.record(hint);
        if (!pieces.empty()) {
            Piece& last = pieces.back();
            if (last.local + last.length == raw.local && last.remote + last.length == raw.remote &&
                last.local_region == raw.region && last.remote_region == region) {
                last.length += raw.length;
                continue;
            }
        }
        pieces.push_back({raw.local, raw.remote, raw.length, raw.region, region});
    }
    return pieces;
}

std::vector<BlockRow> Request::resolve_rows(const RemoteTable& remote) const {
    std::vector<BlockRow> rows = rows_;
    std::size_t hint = AddressIndex::kNone;
    for (std::size_t i = 0; i < rows.size(); ++i) {
        BlockRow& row = rows[i];
        const std::uint64_t pool = row.layout->dst_pool(*row.span);
        hint = remote.index().find(row.span->dst, pool, kTableAccessWrite, hint);
        if (hint == AddressIndex::kNone) throw AddressMiss(true, i, row.span->dst, pool);
        row.remote_region = &remote.record(hint);
    }
    return rows;
}

}  // namespace aioflagcx::engine
