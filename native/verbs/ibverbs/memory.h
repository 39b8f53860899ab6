// Registered memory.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "verbs/ibverbs/handles.h"
#include "verbs/verbs.h"

namespace aioflagcx::verbs::ibverbs {

struct MemoryOptions {
    std::string device;  // for errors
    bool relaxed_ordering = false;
};

// Of the host, or of a GPU. Throws NativeError with what can be done about it.
std::unique_ptr<MemoryRegion> register_memory(std::shared_ptr<ibv_pd> pd,
                                              const MemoryOptions& options, std::uint64_t addr,
                                              std::uint64_t length, std::uint32_t access);

}  // namespace aioflagcx::verbs::ibverbs
