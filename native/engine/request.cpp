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

void Request::find_local() {
    const auto snapshot = table_->snapshot();
    const std::uint32_t need = op_ == Op::Read ? kLocalWritable : 0;
    std::size_t hint = AddressIndex::kNone;
    std::unordered_set<std::size_t> used;
    std::size_t last_used = AddressIndex::kNone;
    for (RawPiece& piece : raw_) {
        hint = snapshot->index.find(piece.local, piece.length, need, hint);
        if (hint == AddressIndex::kNone) {
            throw AddressMiss(false, piece.index, piece.local, piece.length);
        }
        const auto& region = snapshot->regions[hint];
        piece.region = region.get();
        if (hint == last_used) continue;
        last_used = hint;
        if (used.insert(hint).second && !uses_.add(region)) {
            throw AddressMiss(false, piece.index, piece.local, piece.length);  // being deregistered
        }
    }
}

std::vector<Piece> Request::resolve(const RemoteTable& remote) const {
    if (spent_) throw std::invalid_argument("the request has been submitted or released");
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

}  // namespace aioflagcx::engine
