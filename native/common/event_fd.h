// A wake-up that a sleeping poll() sees: Linux eventfd, non-blocking.
#pragma once

#include "common/unique_fd.h"

namespace aioflagcx {

class EventFd {
  public:
    EventFd();

    int fd() const noexcept { return fd_.get(); }
    void signal() noexcept;  // async-signal-safe, never blocks
    void clear() noexcept;   // takes back every signal so far

  private:
    UniqueFd fd_;
};

}  // namespace aioflagcx
