// Registered memory.
#pragma once

#include <cstdint>
#include <memory>

#include "verbs/ibverbs/handles.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

// Throws NativeError with what can be done about it.
std::unique_ptr<MemoryRegion> register_memory(std::shared_ptr<ibv_pd> pd, std::uint64_t addr,
                                              std::uint64_t length, std::uint32_t access);

}  // namespace aioflagcx::verbs::ibverbs
