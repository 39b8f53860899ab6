// The MR table as it travels in the handshake (docs/handshake.md, "MR table"): little-endian,
// fixed-width records, so that 30,000 regions are encoded and read without the GIL in a few
// hundred microseconds.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace aioflagcx::engine {

inline constexpr std::uint32_t kTableAccessRead = 1;   // peers may RDMA_READ
inline constexpr std::uint32_t kTableAccessWrite = 2;  // peers may RDMA_WRITE

// Flag of a region: a write without notification has succeeded only once each queue pair it used
// has read something of the region as well (device memory, relaxed ordering).
inline constexpr std::uint32_t kTableReadAfterWrite = 1;

inline constexpr std::uint32_t kNoName = 0xFFFF'FFFF;

struct TableRecord {
    std::uint64_t id = 0;
    std::uint64_t addr = 0;
    std::uint64_t size = 0;
    std::uint64_t chunk_size = 0;  // bytes of one MR chunk; == size when there is one
    std::uint32_t access = 0;
    std::uint32_t name_off = kNoName;
    std::uint32_t key_off = 0;
    std::uint32_t flags = 0;  // unknown ones mean nothing

    std::uint64_t chunks() const noexcept { return (size - 1) / chunk_size + 1; }
};

struct TableData {
    std::uint32_t devices = 0;
    std::uint64_t generation = 0;
    std::vector<TableRecord> records;
    std::vector<std::uint32_t> keys;  // per record devices x chunks, device-major
    std::string names;                // per name u16 length + UTF-8

    std::string_view name(const TableRecord& record) const noexcept;  // empty for none
    std::uint32_t add_name(std::string_view name);                    // its offset
};

std::string encode_table(const TableData& table);

// Throws std::invalid_argument naming what is wrong; accepts nothing that a later lookup could
// trip over.
TableData decode_table(std::span<const std::uint8_t> bytes);

std::vector<std::uint64_t> decode_removed(std::span<const std::uint8_t> bytes);

}  // namespace aioflagcx::engine
