// What of an address range this process may touch.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

namespace aioflagcx::python {

enum class Mapped : int { No = 0, Readable = 1, Writable = 2, Device = 3 };

// For each address and size > 0, by one pass over /proc/self/maps (proc(5)): nothing is touched,
// so nothing is paged in. Never Device, of which the kernel does not know. Throws NativeError when
// the file cannot be read.
std::vector<Mapped> check_mapped(std::span<const std::uint64_t> addrs,
                                 std::span<const std::uint64_t> sizes);

}  // namespace aioflagcx::python
