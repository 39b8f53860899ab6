// One function per group of bound classes; module.cpp calls them.
#pragma once

#include <pybind11/pybind11.h>

namespace aioflagcx::python {

void bind_allocation(pybind11::module_& module);
void bind_engine(pybind11::module_& module);
void bind_session(pybind11::module_& module);    // Request, Task, Session; after bind_engine
void bind_responder(pybind11::module_& module);  // after bind_engine
void bind_testing(pybind11::module_& module);    // what only tests call; after bind_engine

}  // namespace aioflagcx::python
