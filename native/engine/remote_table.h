// A peer's MR table, as known here.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "engine/address_index.h"
#include "engine/table_codec.h"

namespace aioflagcx::engine {

// One immutable state of the table. Sessions swap a shared_ptr to it; transfers keep the one they
// were resolved against.
class RemoteTable {
  public:
    explicit RemoteTable(TableData data);

    // The state after a delta; `added` holds the new regions.
    std::shared_ptr<const RemoteTable> apply(const TableData& added,
                                             std::span<const std::uint64_t> removed) const;

    const TableData& data() const noexcept { return data_; }
    const AddressIndex& index() const noexcept { return index_; }
    const TableRecord& record(std::size_t i) const noexcept { return data_.records[i]; }
    const TableRecord* find_name(std::string_view name) const noexcept;

    std::uint32_t rkey(const TableRecord& record, std::uint32_t device,
                       std::uint64_t chunk) const noexcept {
        return data_.keys[record.key_off + device * record.chunks() + chunk];
    }

  private:
    TableData data_;
    AddressIndex index_;
    std::unordered_map<std::string_view, std::size_t> by_name_;  // views into data_.names
};

}  // namespace aioflagcx::engine
