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
    for (const Path path : {Path::Process, Path::Local, Path::Tcp}) {
        if (name == path_name(path)) return path;
    }
    return std::nullopt;
}

bool same_machine(const SoftAttributes& a, const SoftAttributes& b) noexcept {
    return a.machine == b.machine && a.machine != Token{};
}

std::string join(const std::vector<std::string>& list) {
    std::string text;
    for (const std::string& item : list) text += (text.empty() ? "" : ",") + item;
    return text;
}

}  // namespace

const char* path_name(Path path) noexcept {
    switch (path) {
        case Path::Process:
            return "process";
        case Path::Local:
            return "local";
        case Path::Tcp:
            break;
    }
    return "tcp";
}

std::vector<std::string> available_paths(const std::vector<std::string>& wanted) {
    std::vector<std::string> available;
    for (const std::string& path : wanted) {
        if (!parse_path(path)) {
            throw NativeError("open_soft_device", EINVAL, "unknown path '" + path + "'");
        }
        if (!contains(available, path)) available.push_back(path);
    }
    if (available.empty()) throw NativeError("open_soft_device", EINVAL, "no path is named");
    return available;
}

std::vector<Path> common_paths(const SoftAttributes& initiator, const SoftAttributes& responder) {
    std::vector<Path> common;
    std::string why;
    for (const std::string& name : initiator.paths) {
        const std::optional<Path> path = parse_path(name);
        if (!path || !contains(responder.paths, name)) continue;
        if (path == Path::Process && initiator.process != responder.process) {
            why += "; 'process' is for engines in one process";
        } else if (path == Path::Local && !same_machine(initiator, responder)) {
            why += "; 'local' is for processes on one machine";
        } else {
            common.push_back(*path);
        }
    }
    if (!common.empty()) return common;
    throw NativeError("connect", EPROTONOSUPPORT,
                      "no possible path in common: the initiator allows '" + join(initiator.paths) +
                          "', the responder '" + join(responder.paths) + "' (soft_paths)" + why);
}

}  // namespace aioflagcx::verbs::soft
