#include "common/event_fd.h"

#include <sys/eventfd.h>

#include <cerrno>
#include <cstdint>

#include "common/error.h"

namespace aioflagcx {

EventFd::EventFd() : fd_(::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    if (!fd_) throw NativeError("eventfd", errno, "");
}

void EventFd::signal() noexcept {
    const std::uint64_t one = 1;
    // EAGAIN means the counter is already far from zero: the reader is woken anyway.
    [[maybe_unused]] ssize_t ignored = ::write(fd_.get(), &one, sizeof one);
}

void EventFd::clear() noexcept {
    std::uint64_t count = 0;
    [[maybe_unused]] ssize_t ignored = ::read(fd_.get(), &count, sizeof count);
}

}  // namespace aioflagcx
