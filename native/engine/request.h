// One transfer's pieces, before anything moves: checked, copied, resolved to regions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "engine/local_table.h"
#include "engine/remote_table.h"

namespace aioflagcx::engine {

enum class Op : std::uint8_t { Write = 0, Read = 1 };

// 64-bit integers owned by the caller, as they come from numpy.
struct IntArray {
    const void* data = nullptr;
    std::size_t count = 0;
    bool is_signed = false;
};

// A piece that lies in no single region that grants the access.
class AddressMiss : public std::runtime_error {
  public:
    AddressMiss(bool remote, std::size_t index, std::uint64_t address, std::uint64_t length);

    bool remote;
    std::size_t index;  // in the caller's arrays
    std::uint64_t address;
    std::uint64_t length;
};

// Consecutive bytes of one local and one remote region.
struct Piece {
    std::uint64_t local = 0;
    std::uint64_t remote = 0;
    std::uint64_t length = 0;
    const LocalRegion* local_region = nullptr;
    const TableRecord* remote_region = nullptr;
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

    Op op() const noexcept { return op_; }
    std::uint64_t bytes_total() const noexcept { return bytes_total_; }
    std::size_t pieces() const noexcept { return raw_.size(); }

    // Neighbours that continue each other on both sides and lie in the same pair of regions are
    // merged. Throws AddressMiss; the request stays usable. Throws std::invalid_argument when it is
    // spent: nothing keeps its regions any more.
    std::vector<Piece> resolve(const RemoteTable& remote) const;

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

    Op op_;
    std::shared_ptr<LocalTable> table_;
    std::vector<RawPiece> raw_;
    std::uint64_t bytes_total_ = 0;
    RegionUses uses_;
    bool spent_ = false;
};

}  // namespace aioflagcx::engine
