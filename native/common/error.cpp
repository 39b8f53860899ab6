#include "common/error.h"

#include <cstring>
#include <utility>

namespace aioflagcx {

namespace {

std::string message(const std::string& call, int error, const std::string& detail) {
    std::string text = call;
    if (!detail.empty()) text += ": " + detail;
    if (error != 0) text += std::string(": ") + std::strerror(error);
    return text;
}

}  // namespace

NativeError::NativeError(std::string call, int error, std::string detail)
    : std::runtime_error(message(call, error, detail)),
      call_(std::move(call)),
      detail_(std::move(detail)),
      error_(error) {}

}  // namespace aioflagcx
