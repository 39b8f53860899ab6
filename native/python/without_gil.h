// Releasing the GIL on threads that the application made.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <optional>

namespace aioflagcx::python {

// What `call` returns or throws, having run without the GIL. For calls that a daemon thread may be
// in at the end of the interpreter: CPython then ends the thread where it asks for the GIL, by
// pthread_exit(3), whose unwinding must not start in a destructor, which is where
// py::gil_scoped_release asks for it.
template <typename Call>
auto without_gil(const Call& call) {
    std::optional<decltype(call())> result;
    std::exception_ptr error;
    PyThreadState* state = PyEval_SaveThread();
    try {
        result.emplace(call());
    } catch (...) {
        error = std::current_exception();
    }
    PyEval_RestoreThread(state);
    if (error) std::rethrow_exception(error);
    return std::move(*result);
}

}  // namespace aioflagcx::python
