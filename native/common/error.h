// The one exception type of the native core.
#pragma once

#include <stdexcept>
#include <string>
#include <string_view>

namespace aioflagcx {

// A failed system or verbs call. `what()` reads "<call>: <detail>: <strerror>"; the parts stay
// available so that Python can build its typed errors without parsing text.
class NativeError : public std::runtime_error {
  public:
    // `error` is an errno value, or 0 when no system call failed.
    NativeError(std::string call, int error, std::string detail);

    const std::string& call() const noexcept { return call_; }
    const std::string& detail() const noexcept { return detail_; }
    int error() const noexcept { return error_; }

  private:
    std::string call_;
    std::string detail_;
    int error_;
};

}  // namespace aioflagcx
