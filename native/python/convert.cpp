#include "python/convert.h"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <string>
#include <variant>
#include <vector>

#include "common/error.h"

namespace aioflagcx::python {

namespace {

// Module-lifetime references: the interpreter frees them with the process.
struct Types {
    py::handle region_record, epoch, transfer_event, endpoint_down, keepalive_lost, immediates;
    py::handle path_note, device_note;
    py::handle native_error, local_miss, remote_miss;
};
Types types;

[[noreturn]] void bad_attribute(const std::string& key, const char* what) {
    throw NativeError("attributes", EPROTO, "'" + key + "' " + what);
}

verbs::AttributeValue value_from(const std::string& key, py::handle value) {
    if (PyLong_Check(value.ptr()) && !PyBool_Check(value.ptr())) {
        const unsigned long long number = PyLong_AsUnsignedLongLong(value.ptr());
        if (PyErr_Occurred()) {
            PyErr_Clear();
            bad_attribute(key, "is no unsigned 64-bit integer");
        }
        return std::uint64_t{number};
    }
    if (py::isinstance<py::bytes>(value)) {
        const auto view = bytes_view(py::reinterpret_borrow<py::bytes>(value));
        return verbs::Bytes(view.begin(), view.end());
    }
    if (py::isinstance<py::str>(value)) return value.cast<std::string>();
    if (py::isinstance<py::list>(value) || py::isinstance<py::tuple>(value)) {
        std::vector<std::string> strings;
        for (const py::handle item : value) {
            if (!py::isinstance<py::str>(item)) bad_attribute(key, "holds something but strings");
            strings.push_back(item.cast<std::string>());
        }
        return strings;
    }
    bad_attribute(key, "is no int, str, bytes or list of str");
}

py::object named_tuple(py::module_& module, const char* name,
                       const std::vector<const char*>& fields) {
    py::list names;
    for (const char* field : fields) names.append(field);
    py::object type = py::module_::import("collections")
                          .attr("namedtuple")(name, names, py::arg("module") = "aioflagcx._native");
    module.attr(name) = type;
    return type;
}

py::handle exception(py::module_& module, const char* name, py::handle base) {
    const std::string full = std::string("aioflagcx._native.") + name;
    const py::handle type = PyErr_NewException(full.c_str(), base.ptr(), nullptr);
    module.attr(name) = type;
    return type;
}

void raise(py::handle type, const char* message,
           const std::vector<std::pair<const char*, py::object>>& attributes) {
    py::object error = type(message);
    for (const auto& [name, value] : attributes) error.attr(name) = value;
    PyErr_SetObject(type.ptr(), error.ptr());
}

void translate(std::exception_ptr pointer) {
    try {
        if (pointer) std::rethrow_exception(pointer);
    } catch (const NativeError& error) {
        raise(types.native_error, error.what(),
              {{"call", py::str(error.call())},
               {"errno", py::int_(error.error())},
               {"detail", py::str(error.detail())}});
    } catch (const engine::AddressMiss& miss) {
        raise(miss.remote ? types.remote_miss : types.local_miss, miss.what(),
              {{"index", py::int_(miss.index)},
               {"address", py::int_(miss.address)},
               {"length", py::int_(miss.length)}});
    }
}

py::object epoch_object(const engine::Epoch& epoch) {
    return types.epoch(epoch.attempt, epoch.rail);
}

struct EventVisitor {
    py::object operator()(const engine::TransferEvent& e) const {
        py::list epochs;
        for (const engine::Epoch& epoch : e.unknown_epochs) epochs.append(epoch_object(epoch));
        return types.transfer_event(e.id, static_cast<int>(e.status), epochs, e.cause, e.vendor_err,
                                    e.rail, e.address, e.length);
    }
    py::object operator()(const engine::EndpointDown& e) const {
        return types.endpoint_down(e.session, epoch_object(e.epoch), e.cause, e.vendor_err, e.rail,
                                   e.path);
    }
    py::object operator()(const engine::KeepaliveLost& e) const {
        return types.keepalive_lost(e.owner, e.reason);
    }
    py::object operator()(const engine::Immediates& e) const {
        return types.immediates(e.responder, e.imm);
    }
    py::object operator()(const engine::DeviceNote& e) const {
        return types.device_note(e.device, e.name, e.text, e.bad, e.back);
    }
    py::object operator()(const engine::PathNote& e) const {
        return types.path_note(e.session, e.rail, e.path, text_or_none(true, e.note));
    }
};

}  // namespace

verbs::Attributes attributes_from(const py::dict& dict) {
    verbs::Attributes attributes;
    for (const auto& [key, value] : dict) {
        if (!py::isinstance<py::str>(key)) bad_attribute("?", "is no string key");
        const auto name = key.cast<std::string>();
        attributes.emplace(name, value_from(name, value));
    }
    return attributes;
}

std::vector<verbs::Attributes> attributes_from(const py::sequence& dicts) {
    std::vector<verbs::Attributes> all;
    for (const py::handle item : dicts) {
        if (!py::isinstance<py::dict>(item)) bad_attribute("rails", "holds something but maps");
        all.push_back(attributes_from(py::reinterpret_borrow<py::dict>(item)));
    }
    return all;
}

py::dict to_dict(const verbs::Attributes& attributes) {
    py::dict dict;
    for (const auto& [key, value] : attributes) {
        if (const auto* number = std::get_if<std::uint64_t>(&value)) {
            dict[py::str(key)] = *number;
        } else if (const auto* text = std::get_if<std::string>(&value)) {
            dict[py::str(key)] = *text;
        } else if (const auto* bytes = std::get_if<verbs::Bytes>(&value)) {
            dict[py::str(key)] =
                py::bytes(reinterpret_cast<const char*>(bytes->data()), bytes->size());
        } else {
            py::list list;
            for (const std::string& item : std::get<std::vector<std::string>>(value)) {
                list.append(item);
            }
            dict[py::str(key)] = list;
        }
    }
    return dict;
}

py::list to_list(const std::vector<verbs::Attributes>& all) {
    py::list list;
    for (const verbs::Attributes& attributes : all) list.append(to_dict(attributes));
    return list;
}

engine::IntArray int_array(const py::array& array, const char* what) {
    const char kind = array.dtype().kind();
    if (array.ndim() != 1 || array.itemsize() != 8 || (kind != 'i' && kind != 'u') ||
        (array.size() > 1 && array.strides(0) != 8)) {
        throw py::type_error(std::string(what) +
                             " must be a contiguous 1-D array of int64 or uint64");
    }
    return {array.data(), static_cast<std::size_t>(array.size()), kind == 'i'};
}

verbs::Deadline deadline_after(double seconds) {
    constexpr double kLong = 1e9;  // seconds; far inside the clock's range
    if (!(seconds < kLong)) return verbs::Deadline::max();
    return verbs::Clock::now() + std::chrono::duration_cast<verbs::Clock::duration>(
                                     std::chrono::duration<double>(std::max(seconds, 0.0)));
}

std::span<const std::uint8_t> bytes_view(const py::bytes& bytes) {
    char* data = nullptr;
    Py_ssize_t size = 0;
    if (PyBytes_AsStringAndSize(bytes.ptr(), &data, &size) != 0) throw py::error_already_set();
    return {reinterpret_cast<const std::uint8_t*>(data), static_cast<std::size_t>(size)};
}

py::object text_or_none(bool present, std::string_view text) {
    if (!present) return py::none();
    PyObject* object =
        PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
    if (object == nullptr) throw py::error_already_set();
    return py::reinterpret_steal<py::object>(object);
}

py::object region_record(const engine::TableRecord& record, std::string_view name) {
    return types.region_record(record.id, record.addr, record.size, record.access,
                               text_or_none(record.name_off != engine::kNoName, name));
}

py::object event_object(const engine::Event& event) { return std::visit(EventVisitor{}, event); }

void bind_types(py::module_& module) {
    types.region_record =
        named_tuple(module, "RegionRecord", {"id", "addr", "size", "access", "name"}).release();
    types.epoch = named_tuple(module, "Epoch", {"attempt", "rail"}).release();
    types.transfer_event = named_tuple(module, "TransferEvent",
                                       {"id", "status", "unknown_epochs", "cause", "vendor_err",
                                        "rail", "address", "length"})
                               .release();
    types.endpoint_down = named_tuple(module, "EndpointDown",
                                      {"session", "epoch", "cause", "vendor_err", "rail", "path"})
                              .release();
    types.keepalive_lost = named_tuple(module, "KeepaliveLost", {"owner", "reason"}).release();
    types.immediates = named_tuple(module, "Immediates", {"responder", "imm"}).release();
    types.device_note =
        named_tuple(module, "DeviceNote", {"device", "name", "text", "bad", "back"}).release();
    types.path_note =
        named_tuple(module, "PathNote", {"session", "rail", "path", "note"}).release();

    types.native_error = exception(module, "NativeError", PyExc_RuntimeError);
    const py::handle miss = exception(module, "AddressMiss", PyExc_LookupError);
    types.local_miss = exception(module, "LocalMiss", miss);
    types.remote_miss = exception(module, "RemoteMiss", miss);
    py::register_exception_translator(&translate);
}

}  // namespace aioflagcx::python
