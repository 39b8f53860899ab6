#include "engine/remote_table.h"

#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>

#include "engine/limits.h"

namespace aioflagcx::engine {

namespace {

std::vector<AddressRange> ranges_of(const TableData& data) {
    std::vector<AddressRange> ranges;
    ranges.reserve(data.records.size());
    for (const TableRecord& r : data.records) ranges.push_back({r.addr, r.size, r.access});
    return ranges;
}

void copy_record(TableData& to, const TableData& from, TableRecord record) {
    const std::string_view name = from.name(record);
    const auto first = from.keys.begin() + record.key_off;
    const auto count = static_cast<std::ptrdiff_t>(record.chunks() * from.devices);
    record.key_off = static_cast<std::uint32_t>(to.keys.size());
    to.keys.insert(to.keys.end(), first, first + count);
    if (record.name_off != kNoName) record.name_off = to.add_name(name);
    to.records.push_back(record);
}

}  // namespace

RemoteTable::RemoteTable(TableData data) : data_(std::move(data)), index_(ranges_of(data_)) {
    for (std::size_t i = 0; i < data_.records.size(); ++i) {
        const TableRecord& record = data_.records[i];
        if (record.name_off != kNoName) by_name_.emplace(data_.name(record), i);
    }
}

std::shared_ptr<const RemoteTable> RemoteTable::apply(
    const TableData& added, std::span<const std::uint64_t> removed) const {
    if (added.devices != data_.devices && !added.records.empty() && !data_.records.empty()) {
        throw std::invalid_argument("MR table: a delta for " + std::to_string(added.devices) +
                                    " devices, the table has " + std::to_string(data_.devices));
    }
    if (data_.records.size() + added.records.size() > kMaxTableEntries ||
        data_.keys.size() + added.keys.size() > kMaxTableEntries ||
        data_.names.size() + added.names.size() > kMaxTableNames) {
        throw std::invalid_argument("MR table: too many entries");
    }
    std::unordered_set<std::uint64_t> gone(removed.begin(), removed.end());
    TableData next;
    next.devices = data_.records.empty() ? added.devices : data_.devices;
    next.generation = added.generation;
    next.records.reserve(data_.records.size() + added.records.size());
    for (const TableRecord& record : added.records) gone.insert(record.id);  // replaced, if known
    for (const TableRecord& record : data_.records) {
        if (!gone.contains(record.id)) copy_record(next, data_, record);
    }
    for (const TableRecord& record : added.records) copy_record(next, added, record);
    return std::make_shared<const RemoteTable>(std::move(next));
}

const TableRecord* RemoteTable::find_name(std::string_view name) const noexcept {
    const auto found = by_name_.find(name);
    return found == by_name_.end() ? nullptr : &data_.records[found->second];
}

}  // namespace aioflagcx::engine
