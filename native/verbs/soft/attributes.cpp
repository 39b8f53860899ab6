#include "verbs/soft/attributes.h"

#include <algorithm>
#include <cerrno>
#include <limits>

#include "common/error.h"
#include "verbs/soft/limits.h"

namespace aioflagcx::verbs::soft {

namespace {

// Longest numeric address: IPv6 with a scope; and more names than there will be paths.
constexpr std::size_t kMaxHost = 64;
constexpr std::size_t kMaxPaths = 16;
constexpr std::size_t kMaxPathName = 32;

[[noreturn]] void reject(const std::string& key, const std::string& why) {
    throw NativeError("peer attributes", EPROTO, "'" + key + "' " + why);
}

template <typename Value>
const Value& get(const Attributes& map, const std::string& key) {
    const auto found = map.find(key);
    if (found == map.end()) reject(key, "is missing");
    const Value* value = std::get_if<Value>(&found->second);
    if (value == nullptr) reject(key, "has the wrong type");
    return *value;
}

std::uint64_t get_number(const Attributes& map, const std::string& key, std::uint64_t low,
                         std::uint64_t high) {
    const auto value = get<std::uint64_t>(map, key);
    if (value < low || value > high) reject(key, "is out of range");
    return value;
}

Token get_token(const Attributes& map, const std::string& key) {
    const auto& bytes = get<Bytes>(map, key);
    Token token;
    if (bytes.size() != token.size()) reject(key, "is not 16 bytes");
    std::copy(bytes.begin(), bytes.end(), token.begin());
    return token;
}

std::string get_text(const Attributes& map, const std::string& key, std::size_t max) {
    const auto& text = get<std::string>(map, key);
    if (text.size() > max || text.find('\0') != std::string::npos) reject(key, "is malformed");
    return text;
}

Bytes to_bytes(const Token& token) { return {token.begin(), token.end()}; }

}  // namespace

Attributes to_map(const SoftAttributes& attributes) {
    Attributes map{
        {"provider", std::string("soft")},
        {"qpn", std::uint64_t{attributes.qpn}},
        {"token", to_bytes(attributes.token)},
        {"process", to_bytes(attributes.process)},
        {"host", attributes.host},
        {"port", std::uint64_t{attributes.port}},
        {"paths", attributes.paths},
        {"streams", std::uint64_t{attributes.streams}},
        {"machine", to_bytes(attributes.machine)},
        {"socket", to_bytes(attributes.socket)},
    };
    return map;
}

SoftAttributes from_map(const Attributes& map) {
    if (get_text(map, "provider", kMaxPathName) != "soft") reject("provider", "is not 'soft'");
    SoftAttributes attributes;
    attributes.qpn = static_cast<std::uint32_t>(
        get_number(map, "qpn", 0, std::numeric_limits<std::uint32_t>::max()));
    attributes.token = get_token(map, "token");
    attributes.process = get_token(map, "process");
    attributes.host = get_text(map, "host", kMaxHost);
    attributes.port = static_cast<std::uint16_t>(
        get_number(map, "port", 1, std::numeric_limits<std::uint16_t>::max()));
    attributes.paths = get<std::vector<std::string>>(map, "paths");
    if (attributes.paths.size() > kMaxPaths) reject("paths", "are too many");
    for (const std::string& path : attributes.paths) {
        if (path.size() > kMaxPathName) reject("paths", "are malformed");
    }
    attributes.streams = static_cast<std::uint32_t>(get_number(map, "streams", 1, kMaxStreams));
    attributes.machine = get_token(map, "machine");
    attributes.socket = get_token(map, "socket");
    return attributes;
}

}  // namespace aioflagcx::verbs::soft
