#include <cerrno>
#include <cstddef>
#include <memory>

#include "common/error.h"
#include "engine/transfer_engine.h"
#include "python/bind_engine.h"
#include "verbs/soft/soft.h"

namespace aioflagcx::python {

namespace py = pybind11;
using engine::TransferEngine;

namespace {

verbs::Device& device_at(TransferEngine& owner, std::size_t index) {
    owner.check_open();
    if (index >= owner.contexts().size()) {
        throw NativeError("device", EINVAL, "there is no device " + std::to_string(index));
    }
    return owner.contexts()[index]->device();
}

}  // namespace

void bind_testing(py::module_& module) {
    using Release = py::call_guard<py::gil_scoped_release>;
    module.def(
        "testing_unplug",
        [](TransferEngine& owner, std::size_t index) {
            verbs::soft::unplug(device_at(owner, index));
        },
        py::arg("engine"), py::arg("device"), Release());
    module.def(
        "testing_plug",
        [](TransferEngine& owner, std::size_t index) {
            verbs::soft::plug(device_at(owner, index));
        },
        py::arg("engine"), py::arg("device"), Release());
}

}  // namespace aioflagcx::python
