#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "common/error.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "python/bind_engine.h"
#include "python/convert.h"
#include "python/without_gil.h"

namespace aioflagcx::python {

using engine::Request;
using engine::Session;
using engine::TransferTask;
using engine::Waiter;

namespace {

// A task and the session that has its queue.
struct Task {
    std::shared_ptr<Session> session;
    std::shared_ptr<TransferTask> task;
};

std::unique_ptr<Request> make_request(engine::TransferEngine& owner, int op, const py::array& local,
                                      const py::array& remote, const py::array& lens) {
    if (op != static_cast<int>(engine::Op::Write) && op != static_cast<int>(engine::Op::Read)) {
        throw py::value_error("op must be OP_WRITE or OP_READ");
    }
    const engine::IntArray locals = int_array(local, "local");
    const engine::IntArray remotes = int_array(remote, "remote");
    const engine::IntArray lengths = int_array(lens, "lens");
    return without_gil([&] {
        owner.check_open();
        return std::make_unique<Request>(owner.regions(), static_cast<engine::Op>(op), locals,
                                         remotes, lengths);
    });
}

std::shared_ptr<engine::BlockLayout> make_layout(const py::array& spans, std::uint64_t src_blocks,
                                                 std::uint64_t dst_blocks) {
    constexpr py::ssize_t kFields = sizeof(engine::BlockSpan) / sizeof(std::uint64_t);
    if (spans.ndim() != 2 || spans.shape(1) != kFields || spans.itemsize() != 8 ||
        spans.dtype().kind() != 'u' || (spans.flags() & py::array::c_style) == 0) {
        throw py::type_error("spans must be a contiguous array of uint64, of shape (n, 8)");
    }
    static_assert(std::is_trivially_copyable_v<engine::BlockSpan>);
    std::vector<engine::BlockSpan> copied(static_cast<std::size_t>(spans.shape(0)));
    if (!copied.empty()) {
        std::memcpy(copied.data(), spans.data(), copied.size() * sizeof(engine::BlockSpan));
    }
    return std::make_shared<engine::BlockLayout>(std::move(copied), src_blocks, dst_blocks);
}

std::unique_ptr<Request> request_blocks(
    engine::TransferEngine& owner, const std::vector<std::shared_ptr<engine::BlockLayout>>& layouts,
    const std::vector<py::array>& src, const std::vector<py::array>& dst) {
    if (layouts.size() != src.size() || layouts.size() != dst.size()) {
        throw py::value_error("there must be as many layouts as lists of blocks");
    }
    std::vector<engine::BlockMove> moves;
    moves.reserve(layouts.size());
    for (std::size_t i = 0; i < layouts.size(); ++i) {
        moves.push_back(
            {layouts[i], int_array(src[i], "src_blocks"), int_array(dst[i], "dst_blocks")});
    }
    return without_gil([&] {
        owner.check_open();
        return std::make_unique<Request>(owner.regions(), moves);
    });
}

std::optional<Task> submit(const std::shared_ptr<Session>& self, Request& request, std::uint64_t id,
                           std::uint32_t imm, bool now, const std::shared_ptr<Waiter>& waiter) {
    auto task = without_gil([&] { return self->submit(request, id, imm, now, waiter); });
    if (!task) return std::nullopt;
    return Task{self, std::move(task)};
}

std::optional<Task> take_back(const std::shared_ptr<Session>& self, Waiter& waiter) {
    const py::gil_scoped_release release;
    auto task = self->take_back(waiter);
    if (!task) return std::nullopt;
    return Task{self, std::move(task)};
}

// A signal may be handled by another thread, or be one that Python makes up itself
// (_thread.interrupt_main): how long it then takes until it is seen.
constexpr std::chrono::milliseconds kSignalLook{100};

bool wait(Waiter& self, std::optional<double> timeout, bool signals) {
    if (self.is_open()) return true;
    const verbs::Deadline deadline = timeout ? deadline_after(*timeout) : verbs::Deadline::max();
    for (;;) {
        if (without_gil(
                [&] { return self.wait(std::min(deadline, verbs::Clock::now() + kSignalLook)); })) {
            return true;
        }
        if (signals && PyErr_CheckSignals() != 0) throw py::error_already_set();
        if (verbs::Clock::now() >= deadline) return self.is_open();
    }
}

py::object record_object(const engine::RemoteTable& table, const engine::TableRecord* record) {
    if (record == nullptr) return py::none();
    return region_record(*record, table.data().name(*record));
}

py::object find(Session& self, std::uint64_t addr, std::uint64_t size) {
    const auto table = self.table();
    const std::size_t found = table->index().find(addr, size, 0);
    return record_object(*table,
                         found == engine::AddressIndex::kNone ? nullptr : &table->record(found));
}

std::optional<std::uint32_t> rkey(Session& self, std::uint64_t addr, std::uint64_t size) {
    const auto table = self.table();
    const std::size_t found = table->index().find(addr, size, 0);
    if (found == engine::AddressIndex::kNone) return std::nullopt;
    const engine::TableRecord& record = table->record(found);
    return table->data().keys[record.key_off + (addr - record.addr) / record.chunk_size];
}

py::object find_name(Session& self, const std::string& name) {
    const auto table = self.table();
    return record_object(*table, table->find_name(name));
}

py::object region_at(Session& self, std::size_t index) {
    const auto table = self.table();
    if (index >= table->index().size()) throw py::index_error("region index out of range");
    return record_object(*table, &table->record(table->index().by_address(index)));
}

py::list names(Session& self) {
    const auto table = self.table();
    py::list all;
    for (std::size_t i = 0; i < table->index().size(); ++i) {
        const engine::TableRecord& record = table->record(table->index().by_address(i));
        if (record.name_off == engine::kNoName) continue;
        all.append(text_or_none(true, table->data().name(record)));
    }
    return all;
}

std::string establish(Session& self, std::uint64_t attempt, std::uint32_t rail,
                      const py::sequence& queue_pairs, double timeout) {
    const std::vector<verbs::Attributes> remote = attributes_from(queue_pairs);
    const py::gil_scoped_release release;
    return self.establish(attempt, rail, remote, deadline_after(timeout));
}

void meet(Session& self, const py::sequence& devices) {
    const std::vector<verbs::Attributes> theirs = attributes_from(devices);
    const py::gil_scoped_release release;
    self.meet(theirs);
}

py::list prepare(Session& self, std::uint64_t attempt, std::uint32_t rail) {
    std::vector<verbs::Attributes> local;
    {
        const py::gil_scoped_release release;
        local = self.prepare(attempt, rail);
    }
    return to_list(local);
}

bool update_table(Session& self, bool full, std::uint64_t base, std::uint64_t generation,
                  const py::bytes& table, const py::bytes& removed) {
    const auto table_view = bytes_view(table);
    const auto removed_view = bytes_view(removed);
    const py::gil_scoped_release release;
    return self.update_table(full, base, generation, table_view, removed_view);
}

void watch(Session& self, const std::string& host, std::uint16_t port, const py::bytes& token) {
    const auto view = bytes_view(token);
    self.watch(host, port, {view.begin(), view.end()});
}

}  // namespace

void bind_session(py::module_& module) {
    py::class_<engine::BlockLayout, std::shared_ptr<engine::BlockLayout>>(module, "BlockLayout")
        .def(py::init(&make_layout), py::arg("spans"), py::arg("src_blocks"), py::arg("dst_blocks"))
        .def_property_readonly("block_bytes", &engine::BlockLayout::block_bytes);

    py::class_<Request>(module, "Request")
        .def(py::init(&make_request), py::arg("engine"), py::arg("op"), py::arg("local"),
             py::arg("remote"), py::arg("lens"))
        .def_static("blocks", &request_blocks, py::arg("engine"), py::arg("layouts"),
                    py::arg("src"), py::arg("dst"))
        .def_property_readonly("bytes_total", &Request::bytes_total)
        .def_property_readonly("pieces", &Request::pieces)
        .def("release", &Request::release, py::call_guard<py::gil_scoped_release>());

    py::class_<Waiter, std::shared_ptr<Waiter>>(module, "Waiter")
        .def(py::init<>())
        .def_property_readonly("is_open", &Waiter::is_open)
        .def("open", &Waiter::open)
        .def("wait", &wait, py::arg("timeout") = py::none(), py::kw_only(),
             py::arg("signals") = true);

    py::class_<Task>(module, "Task")
        .def_property_readonly("bytes_total", [](const Task& t) { return t.task->bytes_total; })
        .def_property_readonly("bytes_done",
                               [](const Task& t) { return t.task->bytes_done.load(); })
        .def_property_readonly("imm_count", [](const Task& t) { return t.task->imm_count.load(); })
        .def(
            "cancel", [](const Task& t) { t.session->cancel(*t.task); },
            py::call_guard<py::gil_scoped_release>())
        .def(
            "abort", [](const Task& t) { t.session->abort(t.task); },
            py::call_guard<py::gil_scoped_release>());

    py::class_<Session, std::shared_ptr<Session>>(module, "Session")
        .def_property_readonly("id", &Session::id)
        .def_property_readonly("generation", &Session::generation)
        .def_property_readonly("region_count",
                               [](Session& self) { return self.table()->index().size(); })
        .def("meet", &meet, py::arg("devices"))
        .def_property_readonly("rails", &Session::rails)
        .def("rail_name", &Session::rail_name, py::arg("rail"))
        .def("local_device", &Session::local_device, py::arg("rail"))
        .def("prepare", &prepare, py::arg("attempt"), py::arg("rail"))
        .def("establish", &establish, py::arg("attempt"), py::arg("rail"), py::arg("queue_pairs"),
             py::arg("timeout"))
        .def("watch", &watch, py::arg("host"), py::arg("port"), py::arg("token"))
        .def("update_table", &update_table, py::arg("full"), py::arg("base"), py::arg("generation"),
             py::arg("table"), py::arg("removed"))
        .def("find", &find, py::arg("addr"), py::arg("size"))
        .def("find_name", &find_name, py::arg("name"))
        .def("rkey", &rkey, py::arg("addr"), py::arg("size"))
        .def("region_at", &region_at, py::arg("index"))
        .def("names", &names)
        .def("submit", &submit, py::arg("request"), py::arg("id"), py::arg("imm") = 0,
             py::arg("now") = false, py::arg("waiter") = py::none())
        .def("take_back", &take_back, py::arg("waiter"))
        .def(
            "fenced",
            [](Session& self, std::uint64_t attempt, std::uint32_t rail) {
                self.fenced({attempt, rail});
            },
            py::arg("attempt"), py::arg("rail"), py::call_guard<py::gil_scoped_release>())
        .def("fail", &Session::fail, py::call_guard<py::gil_scoped_release>())
        .def("close", &Session::close, py::call_guard<py::gil_scoped_release>());
}

}  // namespace aioflagcx::python
