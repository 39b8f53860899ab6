// Conversions between Python objects and the engine's types, and the exceptions.
#pragma once

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <cstdint>
#include <span>
#include <string_view>

#include "engine/event_ring.h"
#include "engine/request.h"
#include "verbs/types.h"
#include "verbs/verbs.h"

namespace aioflagcx::python {

namespace py = pybind11;

// Throws NativeError(EPROTO) for values a queue pair cannot hold: they come from the network.
verbs::Attributes attributes_from(const py::dict& dict);
std::vector<verbs::Attributes> attributes_from(const py::sequence& dicts);
py::dict to_dict(const verbs::Attributes& attributes);
py::list to_list(const std::vector<verbs::Attributes>& all);

// TypeError unless a C-contiguous 1-D array of int64 or uint64. Valid while `array` lives.
engine::IntArray int_array(const py::array& array, const char* what);

// `seconds` from now; far longer than the clock can count is for ever.
verbs::Deadline deadline_after(double seconds);

std::span<const std::uint8_t> bytes_view(const py::bytes& bytes);

// Malformed UTF-8 from a peer shows as U+FFFD instead of failing the lookup.
py::object text_or_none(bool present, std::string_view text);

// (id, addr, size, access, name)
py::object region_record(const engine::TableRecord& record, std::string_view name);
py::object event_object(const engine::Event& event);

// Creates RegionRecord, the event types and the exceptions in `module`, and the translator.
void bind_types(py::module_& module);

}  // namespace aioflagcx::python
