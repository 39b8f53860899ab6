// Whether a range of our own address space can be registered.
#pragma once

#include <cstdint>

namespace aioflagcx::verbs::soft {

// Throws NativeError (EFAULT) when a page of the range is not mapped, or its first or last page
// cannot be read (or written, when asked). Touches no content and allocates at most two pages.
void require_mapped(std::uint64_t addr, std::uint64_t length, bool writable);

}  // namespace aioflagcx::verbs::soft
