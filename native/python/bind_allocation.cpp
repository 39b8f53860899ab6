#include <memory>

#include "engine/allocation.h"
#include "python/bind_engine.h"

namespace aioflagcx::python {

namespace py = pybind11;
using engine::Allocation;

namespace {

py::buffer_info bytes_of(const Allocation& self) {
    const auto size = static_cast<py::ssize_t>(self.size());
    return {reinterpret_cast<std::uint8_t*>(self.addr()), size};
}

}  // namespace

void bind_allocation(py::module_& module) {
    using Release = py::call_guard<py::gil_scoped_release>;
    // Each exported buffer holds the object, and with it the memory.
    py::class_<Allocation, std::shared_ptr<Allocation>>(module, "Allocation", py::buffer_protocol())
        .def(py::init(&Allocation::make), py::arg("size"), py::arg("huge_pages"), Release())
        .def_property_readonly("size", &Allocation::size)
        .def_property_readonly("mapped", &Allocation::mapped)
        .def_property_readonly("page", &Allocation::page)
        .def("populate", &Allocation::populate, py::arg("offset"), py::arg("length"), Release())
        .def_buffer(&bytes_of);
}

}  // namespace aioflagcx::python
