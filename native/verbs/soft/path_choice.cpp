#include "verbs/soft/path_choice.h"

#include <algorithm>
#include <cerrno>

#include "common/error.h"

namespace aioflagcx::verbs::soft {

namespace {

bool contains(const std::vector<std::string>& list, const char* name) {
    return std::find(list.begin(), list.end(), name) != list.end();
}

std::string join(const std::vector<std::string>& list) {
    std::string text;
    for (const std::string& item : list) text += (text.empty() ? "" : ",") + item;
    return text;
}

}  // namespace

std::vector<std::string> available_paths(const std::vector<std::string>& wanted) {
    std::vector<std::string> available;
    for (const std::string& path : wanted) {
        if (path == kPathProcess || path == kPathTcp) {
            if (!contains(available, path.c_str())) available.push_back(path);
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

const char* choose_path(const SoftAttributes& initiator, const SoftAttributes& responder) {
    for (const std::string& path : initiator.paths) {
        if (path == kPathProcess && contains(responder.paths, kPathProcess) &&
            initiator.process == responder.process) {
            return kPathProcess;
        }
        if (path == kPathTcp && contains(responder.paths, kPathTcp)) return kPathTcp;
    }
    throw NativeError("accept", EPROTONOSUPPORT,
                      "no possible path in common: the initiator allows '" + join(initiator.paths) +
                          "', the responder '" + join(responder.paths) + "'");
}

}  // namespace aioflagcx::verbs::soft
