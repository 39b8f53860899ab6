// Which way a QP's requests go.
#pragma once

#include <string>
#include <vector>

#include "verbs/soft/attributes.h"

namespace aioflagcx::verbs::soft {

enum class Path { Process, Tcp };

const char* path_name(Path path) noexcept;

// Those of `wanted` this build can serve. Throws NativeError (EINVAL) when a name is unknown or
// none is left.
std::vector<std::string> available_paths(const std::vector<std::string>& wanted);

// The first of the initiator's preferences that the responder allows too and that is possible
// between the two. Throws NativeError naming both lists when there is none.
Path choose_path(const SoftAttributes& initiator, const SoftAttributes& responder);

}  // namespace aioflagcx::verbs::soft
