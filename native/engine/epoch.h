// The unit of failure.
#pragma once

#include <compare>
#include <cstdint>

namespace aioflagcx::engine {

// One rail's queue pairs of one attempt to connect it: they fail, are fenced and are replaced
// together, and no other rail's with them.
struct Epoch {
    std::uint64_t attempt = 0;
    std::uint32_t rail = 0;

    friend auto operator<=>(const Epoch&, const Epoch&) = default;
};

}  // namespace aioflagcx::engine
