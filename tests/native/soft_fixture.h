// Soft devices with connected queue pairs, for tests of what only they do.
#pragma once

#include "verbs_fixture.h"

namespace aioflagcx::verbs::soft {

inline SoftOptions options_for(const std::string& path, std::uint32_t streams = 2) {
    SoftOptions options;
    options.paths = {path};
    options.streams = streams;
    return options;
}

struct Side : verbs::Side {
    explicit Side(const SoftOptions& options, std::size_t buffer_size = 1 << 20,
                  const QpInit& qp_init = defaults(), std::uint32_t access = kAllAccess)
        : verbs::Side(open_soft_device(options), buffer_size, qp_init, access) {}
};

// Runs on every path: GetParam() is its name.
class OnPath : public ::testing::TestWithParam<const char*> {
  protected:
    bool tcp() const { return std::string(GetParam()) == "tcp"; }
    bool local() const { return std::string(GetParam()) == "local"; }
    SoftOptions options(std::uint32_t streams = 2) const {
        return options_for(GetParam(), streams);
    }
};

#define SOFT_ON_EVERY_PATH(suite)                                                   \
    INSTANTIATE_TEST_SUITE_P(, suite, ::testing::Values("process", "local", "tcp"), \
                             [](const auto& param) { return std::string(param.param); })

}  // namespace aioflagcx::verbs::soft
