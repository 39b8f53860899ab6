// Memory that the engine owns: a sealed memfd, mapped shared, which peers on the same host may map.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <memory>

#include "common/unique_fd.h"

namespace aioflagcx::engine {

// Lifetime: who uses the bytes or the descriptor holds the Allocation, above all its registered
// regions and its exported views. With the last of them mapping and descriptor go, never to be
// used for anything else: a peer that still maps the file reaches only pages that nobody else sees.
//
// Any thread may call anything. The process-wide directory that holding() searches has a lock of
// its own, a leaf.
class Allocation {
  public:
    // A file of `size` bytes, rounded up to whole pages, whose size is sealed, and its mapping; no
    // pages yet, they come by populate(). Waits until allocations that ended before have given
    // their pages back. Throws NativeError: with `huge_pages` also when the system has too few.
    static std::shared_ptr<Allocation> make(std::uint64_t size, bool huge_pages);

    // The one that [addr, addr + size) lies in as a whole, or null.
    static std::shared_ptr<Allocation> holding(std::uint64_t addr, std::uint64_t size);

    ~Allocation();
    Allocation(const Allocation&) = delete;
    Allocation& operator=(const Allocation&) = delete;

    // Gives the pages of [offset, offset + length) to the file, zero-filled, so that touching them
    // cannot fail later, and maps them, so that the first transfer has no page faults. Throws
    // NativeError (ENOSPC, ENOMEM) when there are none. Blocking: about 0.2 s a GiB.
    void populate(std::uint64_t offset, std::uint64_t length);

    std::uint64_t addr() const noexcept { return reinterpret_cast<std::uint64_t>(mapping_.data); }
    std::uint64_t size() const noexcept { return size_; }            // bytes, as asked for
    std::uint64_t mapped() const noexcept { return mapping_.size; }  // bytes, whole pages
    std::uint64_t page() const noexcept { return mapping_.page; }    // bytes
    int fd() const noexcept { return mapping_.fd.get(); }

    // What there is to be freed.
    struct Mapping {
        Mapping() noexcept = default;
        Mapping(Mapping&& other) noexcept;
        Mapping& operator=(Mapping&&) = delete;
        ~Mapping();

        std::byte* data = nullptr;
        std::uint64_t size = 0;
        std::uint64_t page = 0;  // a power of two
        UniqueFd fd;
    };

  private:
    Allocation(std::uint64_t size, Mapping mapping) noexcept;

    const pid_t pid_;
    const std::uint64_t size_;
    Mapping mapping_;
};

}  // namespace aioflagcx::engine
