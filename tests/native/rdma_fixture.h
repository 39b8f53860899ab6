// What tests of the ibverbs provider share: a fake libibverbs, and an engine on its devices.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <memory>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "engine/responder.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "fakes/ibverbs.h"
#include "verbs/ibverbs/ibverbs.h"

namespace aioflagcx::verbs::ibverbs {

using namespace std::chrono_literals;
using testing::fake_verbs;
using testing::FakeVerbs;

inline std::uint64_t address_of(const void* memory) {
    return reinterpret_cast<std::uint64_t>(memory);
}

struct RdmaTest : ::testing::Test {
    RdmaTest() {
        const std::lock_guard lock(fake.mutex);
        fake.max_mr_size = ~std::uint64_t{0};
        fake.max_qp_wr = 1024;
        fake.max_msg_sz = 1U << 30;
        fake.lid = 0;
        fake.port_state = IBV_PORT_ACTIVE;
        fake.longest = fake.max_send_wr = 0;
        fake.gids = {testing::FakeGid{}};
        fake.register_error = fake.dmabuf_error = fake.modify_error = 0;
        fake.hold = false;
        fake.registrations.clear();
        fake.modified.clear();
        fake.posted.clear();
    }

    std::unique_ptr<Device> open(const std::string& name) const {
        IbverbsOptions wanted = options.ibverbs;
        wanted.port.name = wanted.port.device = name;
        return open_ibverbs_device(wanted);
    }

    template <typename T>
    void set(T FakeVerbs::* member, T value) {
        const std::lock_guard lock(fake.mutex);
        fake.*member = std::move(value);
    }
    template <typename T>
    T get(T FakeVerbs::* member) {
        const std::lock_guard lock(fake.mutex);
        return fake.*member;
    }

    FakeVerbs& fake = fake_verbs();
    engine::EngineOptions options;
};

// An engine, and a session whose peer is the engine itself.
struct RdmaEngineTest : RdmaTest {
    RdmaEngineTest() { options.bind_address = options.advertise_address = "127.0.0.1"; }

    void start(std::size_t devices) {
        std::vector<std::unique_ptr<Device>> opened;
        for (std::size_t i = 0; i < devices; ++i) opened.push_back(open(fake.names.at(i)));
        engine = engine::TransferEngine::open(options, std::move(opened));
        session = engine->create_session("peer:1");
        responder = engine->create_responder("peer", engine::Liveness::Seconds(1),
                                             engine::Liveness::Seconds(1000));
    }
    void TearDown() override {
        if (!engine) return;
        set(&FakeVerbs::modify_error, 0);
        session->close();
        responder->close(Deadline::max());
        engine->close();
    }

    std::uint64_t add(const void* memory, std::size_t size, std::uint32_t access) {
        return engine->regions()->add(
            std::vector<engine::RegionSpec>{{address_of(memory), size, access, true, {}}})[0];
    }
    void tell_table() { tell_table(*session); }
    void tell_table(engine::Session& told) {
        const std::string table = engine->regions()->since(0).table;
        told.update_table(true, 0, engine->regions()->generation(),
                          {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()}, {});
    }
    void connect(std::uint64_t attempt, std::uint32_t rail) {
        const auto offer = session->prepare(attempt, rail);
        session->establish(attempt, rail, responder->accept(attempt, offer), Deadline::max());
    }
    std::shared_ptr<engine::TransferTask> write(std::uint64_t id, std::uint64_t from,
                                                std::uint64_t to, std::uint64_t length,
                                                std::uint32_t imm = 0) {
        engine::Request request(engine->regions(), engine::Op::Write, {&from, 1, false},
                                {&to, 1, false}, {&length, 1, false});
        return session->submit(request, id, imm);
    }

    template <typename Enough>
    void wait(Enough enough) {
        while (!enough()) {
            pollfd fd{engine->ring().fd(), POLLIN, 0};
            if (::poll(&fd, 1, 20'000) != 1) throw std::runtime_error("no event came");
            auto [ids, events] = engine->ring().drain();
            done.insert(ids.begin(), ids.end());
            for (engine::Event& event : events) {
                if (auto* transfer = std::get_if<engine::TransferEvent>(&event)) {
                    failed.push_back(*transfer);
                } else if (auto* down = std::get_if<engine::EndpointDown>(&event)) {
                    downs.push_back(*down);
                } else if (auto* note = std::get_if<engine::DeviceNote>(&event)) {
                    notes.push_back(*note);
                }
            }
        }
    }
    void wait_done(std::uint64_t id) {
        wait([&] { return done.contains(id); });
    }
    void wait_notes(std::size_t count) {
        wait([&] { return notes.size() >= count; });
    }
    void wait_downs(std::size_t count) {
        wait([&] { return downs.size() >= count; });
    }

    std::shared_ptr<engine::TransferEngine> engine;
    std::shared_ptr<engine::Session> session;
    std::shared_ptr<engine::Responder> responder;
    std::set<std::uint64_t> done;
    std::vector<engine::TransferEvent> failed;
    std::vector<engine::EndpointDown> downs;
    std::vector<engine::DeviceNote> notes;
};

}  // namespace aioflagcx::verbs::ibverbs
