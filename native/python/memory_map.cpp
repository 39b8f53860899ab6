#include "python/memory_map.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <memory>

#include "common/error.h"

namespace aioflagcx::python {

namespace {

struct Mapping {
    std::uint64_t start;
    std::uint64_t end;
    bool readable;
    bool writable;
};

std::vector<Mapping> read_maps() {
    const std::unique_ptr<std::FILE, int (*)(std::FILE*)> file(std::fopen("/proc/self/maps", "re"),
                                                               &std::fclose);
    if (!file) throw NativeError("open", errno, "/proc/self/maps");
    std::vector<Mapping> mappings;
    char* line = nullptr;
    std::size_t capacity = 0;
    while (::getline(&line, &capacity, file.get()) > 0) {
        Mapping m{};
        char permissions[5] = {};
        if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s", &m.start, &m.end, permissions) != 3) {
            continue;
        }
        m.readable = permissions[0] == 'r';
        m.writable = permissions[1] == 'w';
        mappings.push_back(m);
    }
    std::free(line);
    return mappings;
}

Mapped check_one(const std::vector<Mapping>& mappings, std::uint64_t addr, std::uint64_t size) {
    if (size == 0 || addr + size < addr) return Mapped::No;
    const std::uint64_t end = addr + size;
    auto at = std::upper_bound(mappings.begin(), mappings.end(), addr,
                               [](std::uint64_t a, const Mapping& m) { return a < m.end; });
    Mapped answer = Mapped::Writable;
    for (std::uint64_t covered = addr; covered < end; ++at) {
        if (at == mappings.end() || at->start > covered || !at->readable) return Mapped::No;
        if (!at->writable) answer = Mapped::Readable;
        covered = at->end;
    }
    return answer;
}

}  // namespace

std::vector<Mapped> check_mapped(std::span<const std::uint64_t> addrs,
                                 std::span<const std::uint64_t> sizes) {
    const std::vector<Mapping> mappings = read_maps();
    std::vector<Mapped> answers;
    answers.reserve(addrs.size());
    for (std::size_t i = 0; i < addrs.size(); ++i) {
        answers.push_back(check_one(mappings, addrs[i], sizes[i]));
    }
    return answers;
}

}  // namespace aioflagcx::python
