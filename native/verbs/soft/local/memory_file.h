// Memory that processes share: an anonymous file of fixed size and its mapping.
#pragma once

#include <cstddef>

#include "common/unique_fd.h"

namespace aioflagcx::verbs::soft::local {

// A mapping of the first `size` bytes of a file; the file stays as long as somebody maps it.
class Mapping {
  public:
    Mapping() noexcept = default;
    // Throws NativeError.
    Mapping(int fd, std::size_t size, bool writable);
    Mapping(Mapping&& other) noexcept;
    Mapping& operator=(Mapping&& other) noexcept;
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping();

    void* get() const noexcept { return base_; }
    std::size_t size() const noexcept { return size_; }
    explicit operator bool() const noexcept { return base_ != nullptr; }

  private:
    void* base_ = nullptr;
    std::size_t size_ = 0;
};

// A zero-filled file that can never change its size, so that mapping it cannot fault later.
// Throws NativeError.
UniqueFd create_memory_file(const char* name, std::size_t size);

// Another descriptor of it that cannot write. Throws NativeError, without /proc for one.
UniqueFd reopen_read_only(int fd);

// Likewise, of a file that is mapped for writing already and will be written by that mapping only.
// Throws NativeError.
UniqueFd share_read_only(int fd);

// Of a file that a peer sent. Throws NativeError (EPROTO) unless it has at least `size` bytes and
// can never have fewer. How many it has.
std::size_t require_fixed_size(int fd, std::size_t size);

}  // namespace aioflagcx::verbs::soft::local
