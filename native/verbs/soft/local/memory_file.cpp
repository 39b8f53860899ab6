#include "verbs/soft/local/memory_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <string>
#include <utility>

#include "common/error.h"

namespace aioflagcx::verbs::soft::local {

Mapping::Mapping(int fd, std::size_t size, bool writable) : size_(size) {
    const int protection = writable ? PROT_READ | PROT_WRITE : PROT_READ;
    void* const base = ::mmap(nullptr, size, protection, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) {
        throw NativeError("mmap", errno, std::to_string(size) + " bytes of shared memory");
    }
    base_ = base;
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), size_(std::exchange(other.size_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(size_, other.size_);
    return *this;
}

Mapping::~Mapping() {
    if (base_ != nullptr) ::munmap(base_, size_);
}

UniqueFd create_memory_file(const char* name, std::size_t size) {
    UniqueFd fd(::memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (!fd) throw NativeError("memfd_create", errno, name);
    if (::ftruncate(fd.get(), static_cast<off_t>(size)) != 0 ||
        ::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) {
        throw NativeError("memfd_create", errno, name);
    }
    return fd;
}

UniqueFd reopen_read_only(int fd) {
    const std::string path = "/proc/self/fd/" + std::to_string(fd);
    UniqueFd again(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!again) throw NativeError("open", errno, path);
    return again;
}

UniqueFd share_read_only(int fd) {
    // Since Linux 5.1. Before that, who has a descriptor can open the file anew through /proc.
    if (::fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0) return reopen_read_only(fd);
    UniqueFd again(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (!again) throw NativeError("fcntl", errno, "F_DUPFD_CLOEXEC");
    return again;
}

std::size_t require_fixed_size(int fd, std::size_t size) {
    const int seals = ::fcntl(fd, F_GET_SEALS);
    struct stat status{};
    if (seals < 0 || (seals & F_SEAL_SHRINK) == 0 || ::fstat(fd, &status) != 0 ||
        static_cast<std::uint64_t>(status.st_size) < size) {
        throw NativeError("connect", EPROTO, "the peer's shared memory is not of a fixed size");
    }
    return static_cast<std::size_t>(status.st_size);
}

}  // namespace aioflagcx::verbs::soft::local
