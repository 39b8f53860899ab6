// Which way a QP's requests go.
#pragma once

#include <string>
#include <vector>

#include "verbs/soft/attributes.h"

namespace aioflagcx::verbs::soft {

enum class Path { Process, Local, Tcp };

const char* path_name(Path path) noexcept;

// `wanted` without repetitions. Throws NativeError (EINVAL) when a name is unknown or there is
// none.
std::vector<std::string> available_paths(const std::vector<std::string>& wanted);

// Those that the initiator and the responder both allow and that may be possible between the two,
// in the initiator's order. Throws NativeError (EPROTONOSUPPORT) naming both lists when there is
// none.
std::vector<Path> common_paths(const SoftAttributes& initiator, const SoftAttributes& responder);

}  // namespace aioflagcx::verbs::soft
