#include "engine/table_codec.h"

#include <bit>
#include <cstring>
#include <stdexcept>

#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

static_assert(std::endian::native == std::endian::little, "the table is copied as it lies");

constexpr std::uint32_t kMagic = 0x524D'4641;  // "AFMR"
constexpr std::uint16_t kVersion = 1;

struct WireHeader {
    std::uint32_t magic;
    std::uint16_t version;
    std::uint16_t devices;
    std::uint32_t count;
    std::uint32_t key_count;
    std::uint32_t names_size;
    std::uint32_t reserved;
    std::uint64_t generation;
};
static_assert(sizeof(WireHeader) == 32);

struct WireRecord {
    std::uint64_t id;
    std::uint64_t addr;
    std::uint64_t size;
    std::uint64_t chunk_size;
    std::uint32_t access;
    std::uint32_t name_off;
    std::uint32_t key_off;
    std::uint32_t flags;
};
static_assert(sizeof(WireRecord) == 48);

template <typename T>
void append(std::string& out, const T& value) {
    out.append(reinterpret_cast<const char*>(&value), sizeof value);
}

[[noreturn]] void broken(const std::string& what) {
    throw std::invalid_argument("MR table: " + what);
}

void check_record(const TableData& table, const TableRecord& r) {
    const std::string where = "region " + std::to_string(r.id) + ": ";
    if (r.size == 0 || r.addr + (r.size - 1) < r.addr) broken(where + "bad address range");
    if (r.chunk_size == 0 || r.chunk_size > r.size) broken(where + "bad chunk size");
    const std::uint64_t chunks = r.chunks();
    if (chunks > kMaxTableEntries || r.key_off > table.keys.size() ||
        chunks * table.devices > table.keys.size() - r.key_off) {
        broken(where + "keys outside the table");
    }
    if (r.name_off == kNoName) return;
    if (table.names.size() < 2 || r.name_off > table.names.size() - 2) {
        broken(where + "name outside the table");
    }
    std::uint16_t length = 0;
    std::memcpy(&length, table.names.data() + r.name_off, sizeof length);
    if (length > table.names.size() - 2 - r.name_off) broken(where + "name outside the table");
}

}  // namespace

std::string_view TableData::name(const TableRecord& record) const noexcept {
    if (record.name_off == kNoName) return {};
    std::uint16_t length = 0;
    std::memcpy(&length, names.data() + record.name_off, sizeof length);
    return std::string_view(names).substr(record.name_off + sizeof length, length);
}

std::uint32_t TableData::add_name(std::string_view name) {
    if (name.size() > UINT16_MAX)
        throw std::invalid_argument("a region's name is over 65,535 bytes");
    const auto offset = static_cast<std::uint32_t>(names.size());
    append(names, static_cast<std::uint16_t>(name.size()));
    names.append(name);
    return offset;
}

std::string encode_table(const TableData& table) {
    std::string out;
    out.reserve(sizeof(WireHeader) + table.records.size() * sizeof(WireRecord) +
                table.keys.size() * 4 + table.names.size());
    append(out, WireHeader{kMagic, kVersion, static_cast<std::uint16_t>(table.devices),
                           static_cast<std::uint32_t>(table.records.size()),
                           static_cast<std::uint32_t>(table.keys.size()),
                           static_cast<std::uint32_t>(table.names.size()), 0, table.generation});
    for (const TableRecord& r : table.records) {
        append(out, WireRecord{r.id, r.addr, r.size, r.chunk_size, r.access, r.name_off, r.key_off,
                               r.flags});
    }
    out.append(reinterpret_cast<const char*>(table.keys.data()), table.keys.size() * 4);
    out.append(table.names);
    return out;
}

TableData decode_table(std::span<const std::uint8_t> bytes) {
    WireHeader header{};
    if (bytes.size() < sizeof header) broken("shorter than its header");
    std::memcpy(&header, bytes.data(), sizeof header);
    if (header.magic != kMagic) broken("bad magic");
    if (header.version != kVersion) {
        broken("version " + std::to_string(header.version) + ", expected 1");
    }
    if (header.count > kMaxTableEntries || header.key_count > kMaxTableEntries) {
        broken("too many entries");
    }
    const std::uint64_t expected = sizeof header +
                                   std::uint64_t{header.count} * sizeof(WireRecord) +
                                   std::uint64_t{header.key_count} * 4 + header.names_size;
    if (bytes.size() != expected) {
        broken("is " + std::to_string(bytes.size()) + " bytes, its header says " +
               std::to_string(expected));
    }
    TableData table;
    table.devices = header.devices;
    table.generation = header.generation;
    const std::uint8_t* at = bytes.data() + sizeof header;
    table.records.reserve(header.count);
    for (std::uint32_t i = 0; i < header.count; ++i, at += sizeof(WireRecord)) {
        WireRecord r{};
        std::memcpy(&r, at, sizeof r);
        table.records.push_back(
            {r.id, r.addr, r.size, r.chunk_size, r.access, r.name_off, r.key_off, r.flags});
    }
    table.keys.resize(header.key_count);
    if (header.key_count != 0)
        std::memcpy(table.keys.data(), at, std::size_t{header.key_count} * 4);
    at += std::size_t{header.key_count} * 4;
    table.names.assign(reinterpret_cast<const char*>(at), header.names_size);
    if (table.devices == 0 && header.count != 0) broken("regions but no device");
    // Keys and names that records share would grow when a delta is applied.
    std::uint64_t keys = 0;
    std::uint64_t names = 0;
    for (const TableRecord& record : table.records) {
        check_record(table, record);
        keys += record.chunks() * table.devices;
        if (record.name_off != kNoName) names += sizeof(std::uint16_t) + table.name(record).size();
    }
    if (keys > table.keys.size() || names > table.names.size()) {
        broken("regions share keys or names");
    }
    return table;
}

std::vector<std::uint64_t> decode_removed(std::span<const std::uint8_t> bytes) {
    if (bytes.size() % 8 != 0) broken("removed ids are not a whole number of u64");
    std::vector<std::uint64_t> ids(bytes.size() / 8);
    if (!ids.empty()) std::memcpy(ids.data(), bytes.data(), bytes.size());
    return ids;
}

}  // namespace aioflagcx::engine
