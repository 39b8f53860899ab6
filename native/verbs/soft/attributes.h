// What soft QPs tell each other through the handshake, checked before it is used.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "verbs/soft/token.h"
#include "verbs/types.h"

namespace aioflagcx::verbs::soft {

struct SoftAttributes {
    std::uint32_t qpn = 0;
    Token token{};     // of the QP
    Token process{};   // of its process
    std::string host;  // numeric address of its device's listener
    std::uint16_t port = 0;
    std::vector<std::string> paths;  // in order of preference
    std::uint32_t streams = 0;       // TCP streams it opens as an initiator
    Token machine{};                 // of the running kernel: what shares it may share memory
    Token socket{};                  // name of its device's local listener
};

Attributes to_map(const SoftAttributes& attributes);

// Throws NativeError (EPROTO) naming the key whose value is missing or not as it must be. Unknown
// keys are ignored, for later versions to use.
SoftAttributes from_map(const Attributes& map);

}  // namespace aioflagcx::verbs::soft
