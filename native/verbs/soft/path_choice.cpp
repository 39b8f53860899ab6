#include "verbs/soft/path_choice.h"

#include <algorithm>
#include <cerrno>
#include <optional>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

namespace {

bool contains(const std::vector<std::string>& list, const std::string& name) {
    return std::find(list.begin(), list.end(), name) != list.end();
}

std::optional<Path> parse_path(const std::string& name) noexcept {
    if (name == path_name(Path::Process)) return Path::Process;
    if (name == path_name(Path::Tcp)) return Path::Tcp;
    return std::nullopt;
}

std::string join(const std::vector<std::string>& list) {
    std::string text;
    for (const std::string& item : list) text += (text.empty() ? "" : ",") + item;
    return text;
}

}  // namespace

const char* path_name(Path path) noexcept { return path == Path::Process ? "process" : "tcp"; }

std::vector<std::string> available_paths(const std::vector<std::string>& wanted) {
    std::vector<std::string> available;
    for (const std::string& path : wanted) {
        if (parse_path(path)) {
            if (!contains(available, path)) available.push_back(path);
        } else if (path != "local") {  // known, but not served by this build
            throw NativeError("open_soft_device", EINVAL, "unknown path '" + path + "'");
        }
    }
    if (available.empty()) {
        throw NativeError("open_soft_device", EINVAL,
                          "none of the paths '" + join(wanted) + "' is available");
    }
    return available;
}

Path choose_path(const SoftAttributes& initiator, const SoftAttributes& responder) {
    for (const std::string& name : initiator.paths) {
        const std::optional<Path> path = parse_path(name);
        if (!path || !contains(responder.paths, name)) continue;
        if (path == Path::Process && initiator.process != responder.process) continue;
        return *path;
    }
    throw NativeError("accept", EPROTONOSUPPORT,
                      "no possible path in common: the initiator allows '" + join(initiator.paths) +
                          "', the responder '" + join(responder.paths) + "'");
}

}  // namespace aioflagcx::verbs::soft
