// The `_native` extension module; aioflagcx/_native.pyi documents every name.
#include <pybind11/pybind11.h>

#include "engine/request.h"
#include "engine/table_codec.h"
#include "python/bind_engine.h"
#include "python/convert.h"

PYBIND11_MODULE(_native, module) {
    using namespace aioflagcx;
    module.doc() = "The native core of aioflagcx.";
    module.attr("ACCESS_REMOTE_READ") = engine::kTableAccessRead;
    module.attr("ACCESS_REMOTE_WRITE") = engine::kTableAccessWrite;
    module.attr("OP_WRITE") = static_cast<int>(engine::Op::Write);
    module.attr("OP_READ") = static_cast<int>(engine::Op::Read);
    module.attr("STATUS_DONE") = static_cast<int>(engine::TaskStatus::Done);
    module.attr("STATUS_CANCELLED") = static_cast<int>(engine::TaskStatus::Cancelled);
    module.attr("STATUS_REMOTE_ACCESS") = static_cast<int>(engine::TaskStatus::RemoteAccess);
    module.attr("STATUS_RETRY_EXCEEDED") = static_cast<int>(engine::TaskStatus::RetryExceeded);
    module.attr("STATUS_LOCAL") = static_cast<int>(engine::TaskStatus::Local);
    module.attr("STATUS_LOST") = static_cast<int>(engine::TaskStatus::Lost);
    python::bind_types(module);
    python::bind_allocation(module);
    python::bind_engine(module);
    python::bind_session(module);
    python::bind_responder(module);
    python::bind_testing(module);
}
