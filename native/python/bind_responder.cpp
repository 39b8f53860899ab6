#include <pybind11/stl.h>

#include <memory>
#include <vector>

#include "engine/responder.h"
#include "python/bind_engine.h"
#include "python/convert.h"

namespace aioflagcx::python {

using engine::Responder;

namespace {

py::bytes keepalive_token(const Responder& self) {
    const auto& token = self.keepalive_token();
    return py::bytes(reinterpret_cast<const char*>(token.data()), token.size());
}

py::list accept(Responder& self, std::uint64_t attempt, const py::sequence& rails) {
    const std::vector<verbs::Attributes> remote = attributes_from(rails);
    std::vector<verbs::Attributes> local;
    {
        const py::gil_scoped_release release;
        local = self.accept(attempt, remote);
    }
    return to_list(local);
}

}  // namespace

void bind_responder(py::module_& module) {
    using Release = py::call_guard<py::gil_scoped_release>;
    py::class_<Responder, std::shared_ptr<Responder>>(module, "Responder")
        .def_property_readonly("id", &Responder::id)
        .def_property_readonly("keepalive_token", &keepalive_token)
        // Its lock is held while queue pairs are set up and fenced.
        .def_property_readonly("path", py::cpp_function(&Responder::path, Release()))
        .def("accept", &accept, py::arg("attempt"), py::arg("rails"))
        .def(
            "fence",
            [](Responder& self, std::uint64_t attempt, std::uint64_t rail, double timeout) {
                return self.fence(attempt, rail, deadline_after(timeout));
            },
            py::arg("attempt"), py::arg("rail"), py::arg("timeout"), Release())
        .def(
            "fence_all",
            [](Responder& self, double timeout) { return self.fence_all(deadline_after(timeout)); },
            py::arg("timeout"), Release())
        .def("expect", &Responder::expect, py::arg("imm"), py::arg("count"), Release())
        .def("forget", &Responder::forget, py::arg("imm"), Release())
        .def(
            "close",
            [](Responder& self, double timeout) { return self.close(deadline_after(timeout)); },
            py::arg("timeout"), Release());
}

}  // namespace aioflagcx::python
