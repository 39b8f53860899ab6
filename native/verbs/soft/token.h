// Random names: they cannot be guessed, so knowing one proves the handshake told it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace aioflagcx::verbs::soft {

using Token = std::array<std::uint8_t, 16>;

struct TokenHash {
    std::size_t operator()(const Token& token) const noexcept {
        std::size_t hash = 0;
        std::memcpy(&hash, token.data(), sizeof hash);
        return hash;
    }
};

// Fills `size` bytes from the kernel's generator.
void random_bytes(void* out, std::size_t size);
Token random_token();

// Names this process; a fork()ed child has another one.
Token process_token();

// Names the running kernel: its boot id (random(4)). All zeros where /proc does not tell.
Token machine_token() noexcept;

}  // namespace aioflagcx::verbs::soft
