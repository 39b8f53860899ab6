#include "python/bind_engine.h"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <algorithm>
#include <optional>
#include <span>
#include <utility>

#include "common/error.h"
#include "engine/devices.h"
#include "engine/responder.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "python/convert.h"
#include "python/memory_map.h"
#include "verbs/cuda.h"

namespace aioflagcx::python {

using engine::EngineOptions;
using engine::TransferEngine;

namespace {

using Numbers = py::array_t<std::uint64_t, py::array::c_style>;

// Of as many elements as `addrs`; valid while the array lives.
template <typename T>
std::span<const T> as_many(const py::array_t<T, py::array::c_style>& array, const Numbers& addrs) {
    if (array.ndim() != 1 || array.size() != addrs.size()) {
        throw py::value_error("arrays of different shapes");
    }
    return {array.data(), static_cast<std::size_t>(array.size())};
}

template <typename T, typename U>
py::array_t<T> array_of(const std::vector<U>& values) {
    py::array_t<T> array(static_cast<py::ssize_t>(values.size()));
    std::transform(values.begin(), values.end(), array.mutable_data(),
                   [](U value) { return static_cast<T>(value); });
    return array;
}

std::shared_ptr<TransferEngine> make_engine(
    std::vector<std::string> devices, std::string bind_address, std::string advertise_address,
    std::vector<std::string> soft_paths, std::uint32_t soft_streams, bool allow_ptrace,
    std::optional<std::uint32_t> gid_index, std::uint8_t traffic_class, std::uint8_t service_level,
    std::uint8_t qp_timeout, std::uint8_t qp_retry_count, bool relaxed_ordering,
    std::uint32_t slice_size, std::uint32_t workers_per_device, std::uint32_t qps_per_endpoint,
    std::uint32_t max_wr_per_qp, std::uint64_t max_inflight_bytes_per_endpoint,
    std::uint32_t post_batch, std::uint32_t spin_us, std::uint32_t retry_count,
    std::uint8_t rnr_retry, double keepalive_interval, double keepalive_timeout) {
    EngineOptions options;
    options.devices = std::move(devices);
    options.bind_address = std::move(bind_address);
    options.advertise_address = std::move(advertise_address);
    options.soft_paths = std::move(soft_paths);
    options.soft_streams = soft_streams;
    options.allow_ptrace = allow_ptrace;
    options.ibverbs.gid_index = gid_index;
    options.ibverbs.traffic_class = traffic_class;
    options.ibverbs.service_level = service_level;
    options.ibverbs.timeout = qp_timeout;
    options.ibverbs.retry_cnt = qp_retry_count;
    options.ibverbs.relaxed_ordering = relaxed_ordering;
    options.slice_size = slice_size;
    options.workers_per_device = workers_per_device;
    options.qps_per_endpoint = qps_per_endpoint;
    options.max_wr_per_qp = max_wr_per_qp;
    options.max_inflight_bytes_per_endpoint = max_inflight_bytes_per_endpoint;
    options.post_batch = post_batch;
    options.spin = std::chrono::microseconds(spin_us);
    options.retry_count = retry_count;
    options.rnr_retry = rnr_retry;
    options.keepalive_interval = std::chrono::duration<double>(keepalive_interval);
    options.keepalive_timeout = std::chrono::duration<double>(keepalive_timeout);
    const py::gil_scoped_release release;
    engine::OpenedDevices opened = engine::open_devices(options);
    options.device_choice = std::move(opened.reason);
    return TransferEngine::open(std::move(options), std::move(opened.devices));
}

Numbers register_ranges(TransferEngine& self, const Numbers& addrs, const Numbers& sizes,
                        std::uint32_t access, const py::array_t<bool, py::array::c_style>& writable,
                        std::vector<std::optional<std::string>> names, const Numbers& nearest) {
    const std::span<const std::uint64_t> addr = as_many(addrs, addrs);
    const std::span<const std::uint64_t> size = as_many(sizes, addrs);
    const std::span<const bool> write = as_many(writable, addrs);
    const std::span<const std::uint64_t> near = as_many(nearest, addrs);
    if (names.size() != addr.size()) throw py::value_error("arrays of different shapes");
    std::vector<std::uint64_t> ids;
    {
        const py::gil_scoped_release release;
        self.check_open();
        std::vector<engine::RegionSpec> specs;
        specs.reserve(addr.size());
        for (std::size_t i = 0; i < addr.size(); ++i) {
            specs.push_back({addr[i], size[i], access, write[i], std::move(names[i]), near[i]});
        }
        ids = self.regions()->add(specs);
    }
    return array_of<std::uint64_t>(ids);
}

py::tuple table_since(TransferEngine& self, std::uint64_t generation) {
    engine::LocalTable::Changes changes;
    {
        const py::gil_scoped_release release;
        changes = self.regions()->since(generation);
    }
    return py::make_tuple(changes.full, changes.base, changes.generation, py::bytes(changes.table),
                          py::bytes(changes.removed));
}

py::object region(TransferEngine& self, std::uint64_t id) {
    std::string name;
    const auto record = self.regions()->find(id, &name);
    if (!record) return py::none();
    return region_record(*record, name);
}

py::tuple poll_events(TransferEngine& self) {
    const auto [done, events] = self.ring().drain();
    py::list done_ids;
    for (const std::uint64_t id : done) done_ids.append(id);
    py::list others;
    for (const engine::Event& event : events) others.append(event_object(event));
    return py::make_tuple(done_ids, others);
}

py::dict stats(TransferEngine& self) {
    const engine::Stats& s = self.stats();
    py::dict all;
    const auto put = [&all](const char* name, const std::atomic<std::uint64_t>& value) {
        all[name] = value.load(std::memory_order_relaxed);
    };
    put("bytes_written", s.bytes_written);
    put("bytes_read", s.bytes_read);
    put("slices_posted", s.slices_posted);
    put("slices_reposted", s.slices_reposted);
    put("transfers_submitted", s.transfers_submitted);
    put("transfers_done", s.transfers_done);
    put("transfers_failed", s.transfers_failed);
    put("transfers_inflight", s.transfers_inflight);
    put("bytes_inflight", s.bytes_inflight);
    put("sessions", s.sessions);
    put("responders", s.responders);
    put("wakeups", s.wakeups);
    put("worker_sleeps", s.worker_sleeps);
    put("keepalive_wakeups", s.keepalive_wakeups);
    put("endpoints_failed", s.endpoints_failed);
    all["regions"] = self.regions()->size();
    return all;
}

py::array_t<std::int8_t> check_ranges(TransferEngine&, const Numbers& addrs, const Numbers& sizes) {
    const std::span<const std::uint64_t> addr = as_many(addrs, addrs);
    const std::span<const std::uint64_t> size = as_many(sizes, addrs);
    std::vector<Mapped> mapped;
    {
        const py::gil_scoped_release release;
        mapped = check_mapped(addr, size);
        for (std::size_t i = 0; i < mapped.size(); ++i) {
            // What the CPU cannot touch may be a GPU's.
            if (mapped[i] == Mapped::No && verbs::DeviceMemory::find(addr[i], size[i])) {
                mapped[i] = Mapped::Device;
            }
        }
    }
    return array_of<std::int8_t>(mapped);
}

bool takes_device_memory(const TransferEngine& self) {
    return std::all_of(self.contexts().begin(), self.contexts().end(),
                       [](const auto& context) { return context->pd().takes_device_memory(); });
}

std::vector<std::string> device_names(const TransferEngine& self) {
    std::vector<std::string> names;
    for (const auto& context : self.contexts()) names.push_back(context->name());
    return names;
}

py::list device_descriptions(const TransferEngine& self) {
    std::vector<verbs::Attributes> all;
    {
        const py::gil_scoped_release release;
        for (const auto& context : self.contexts()) {
            const verbs::Network network = context->device().network();
            all.push_back(
                {{"name", context->name()}, {"kind", network.kind}, {"subnet", network.subnet}});
        }
    }
    return to_list(all);
}

}  // namespace

void bind_engine(py::module_& module) {
    // The destructor joins threads, which never take the GIL.
    py::class_<TransferEngine, std::shared_ptr<TransferEngine>>(module, "TransferEngine")
        .def(py::init(&make_engine), py::kw_only(), py::arg("devices"), py::arg("bind_address"),
             py::arg("advertise_address"), py::arg("soft_paths"), py::arg("soft_streams"),
             py::arg("allow_ptrace"), py::arg("gid_index"), py::arg("traffic_class"),
             py::arg("service_level"), py::arg("qp_timeout"), py::arg("qp_retry_count"),
             py::arg("relaxed_ordering"), py::arg("slice_size"), py::arg("workers_per_device"),
             py::arg("qps_per_endpoint"), py::arg("max_wr_per_qp"),
             py::arg("max_inflight_bytes_per_endpoint"), py::arg("post_batch"), py::arg("spin_us"),
             py::arg("retry_count"), py::arg("rnr_retry"), py::arg("keepalive_interval"),
             py::arg("keepalive_timeout"))
        .def("close", &TransferEngine::close, py::call_guard<py::gil_scoped_release>())
        .def_property_readonly("event_fd", [](TransferEngine& self) { return self.ring().fd(); })
        .def_property_readonly("devices", &device_names)
        .def_property_readonly("takes_device_memory", &takes_device_memory)
        .def_property_readonly("device_descriptions", &device_descriptions)
        .def(
            "device_down",
            [](TransferEngine& self, std::size_t device) {
                return self.contexts().at(device)->down();
            },
            py::arg("device"))
        .def_property_readonly("device_choice",
                               [](TransferEngine& self) { return self.options().device_choice; })
        .def_property_readonly("keepalive_port",
                               [](TransferEngine& self) { return self.liveness().port(); })
        .def_property_readonly("generation",
                               [](TransferEngine& self) { return self.regions()->generation(); })
        .def("poll_events", &poll_events)
        .def("check_mapped", &check_ranges, py::arg("addrs").noconvert(),
             py::arg("sizes").noconvert())
        .def("register", &register_ranges, py::arg("addrs").noconvert(),
             py::arg("sizes").noconvert(), py::arg("access"), py::arg("writable").noconvert(),
             py::arg("names"), py::arg("nearest").noconvert())
        .def(
            "revoke",
            [](TransferEngine& self, const std::vector<std::uint64_t>& ids) {
                const py::gil_scoped_release release;
                self.regions()->revoke(ids);
            },
            py::arg("region_ids"))
        .def(
            "deregister",
            [](TransferEngine& self, const std::vector<std::uint64_t>& ids,
               std::optional<double> timeout) {
                const py::gil_scoped_release release;
                return self.regions()->remove(
                    ids, timeout ? deadline_after(*timeout) : verbs::Deadline::max());
            },
            py::arg("region_ids"), py::arg("timeout"))
        .def("table_since", &table_since, py::arg("generation"))
        .def("region", &region, py::arg("region_id"))
        .def(
            "rkey",
            [](TransferEngine& self, std::uint64_t id, std::uint64_t addr) {
                return self.regions()->rkey(id, addr);
            },
            py::arg("region_id"), py::arg("addr"))
        .def("create_session", &TransferEngine::create_session, py::arg("peer"))
        .def(
            "create_responder",
            [](TransferEngine& self, const std::string& peer, double interval, double timeout) {
                return self.create_responder(peer, engine::Liveness::Seconds(interval),
                                             engine::Liveness::Seconds(timeout));
            },
            py::arg("peer"), py::arg("keepalive_interval"), py::arg("keepalive_timeout"))
        .def("stats", &stats)
        .def("rail_bytes", [](TransferEngine& self) { return self.rail_counters().snapshot(); });
}

}  // namespace aioflagcx::python
