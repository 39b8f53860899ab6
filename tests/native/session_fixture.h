// What tests of sessions on the fake device share.
#pragma once

#include <gtest/gtest.h>
#include <poll.h>

#include <numeric>
#include <set>
#include <stdexcept>

#include "engine/responder.h"
#include "engine/session.h"
#include "engine/transfer_engine.h"
#include "fake_device.h"

namespace aioflagcx::engine {

using namespace std::chrono_literals;
using testing::FakeDevice;
using testing::Script;
using verbs::WcStatus;

inline constexpr std::uint64_t kSlice = 4096;

// An engine on fake devices, a session whose peer is the engine itself, two buffers.
struct SessionTest : ::testing::Test {
    SessionTest() {
        options.bind_address = options.advertise_address = "127.0.0.1";
        options.slice_size = kSlice;
        options.max_inflight_bytes_per_endpoint = 8 * kSlice;
        options.post_batch = 4;
    }
    void start(std::size_t devices, std::uint64_t max_mr_size = UINT64_MAX / 2) {
        std::vector<std::unique_ptr<verbs::Device>> opened;
        for (std::size_t i = 0; i < devices; ++i) {
            scripts.push_back(std::make_shared<Script>());
            scripts.back()->relaxed = relaxed;
            opened.push_back(std::make_unique<FakeDevice>("fake" + std::to_string(i),
                                                          scripts.back(), max_mr_size));
        }
        engine = TransferEngine::open(options, std::move(opened));
        const auto addr_of = [](auto& buffer) {
            return reinterpret_cast<std::uint64_t>(buffer.data());
        };
        std::iota(source.begin(), source.end(), std::uint8_t{1});
        ids = engine->regions()->add(std::vector<RegionSpec>{
            {addr_of(source), source.size(), kTableAccessRead, true, "source", nearest},
            {addr_of(target), target.size(), kTableAccessRead | kTableAccessWrite, true,
             "target"}});
        session = engine->create_session("peer:1");
        const std::string table = engine->regions()->since(0).table;
        session->update_table(true, 0, engine->regions()->generation(),
                              {reinterpret_cast<const std::uint8_t*>(table.data()), table.size()},
                              {});
        establish(1);
    }
    void TearDown() override {
        for (const auto& script : scripts) script->set_hold(false);
        session->close();
        engine->close();
    }

    void establish(std::uint64_t attempt) {
        for (std::uint32_t rail = 0; rail < scripts.size(); ++rail) establish(attempt, rail);
    }
    void establish(std::uint64_t attempt, std::uint32_t rail) {
        auto remote = session->prepare(attempt, rail);
        for (auto& attributes : remote) attributes["device"] = attributes["rail"];
        session->establish(attempt, rail, remote, verbs::Deadline::max());
    }
    std::shared_ptr<TransferTask> write(std::uint64_t id, std::uint64_t offset,
                                        std::uint64_t length, std::uint32_t imm = 0) {
        const std::uint64_t from = reinterpret_cast<std::uint64_t>(source.data()) + offset;
        const std::uint64_t to = reinterpret_cast<std::uint64_t>(target.data()) + offset;
        Request request(engine->regions(), Op::Write, {&from, 1, false}, {&to, 1, false},
                        {&length, 1, false});
        return session->submit(request, id, imm);
    }

    // Collects events until `enough` says so.
    template <typename Enough>
    void wait(Enough enough) {
        while (!enough()) {
            pollfd fd{engine->ring().fd(), POLLIN, 0};
            if (::poll(&fd, 1, 20'000) != 1) throw std::runtime_error("no event came");
            auto [ids_done, events] = engine->ring().drain();
            done.insert(ids_done.begin(), ids_done.end());
            for (Event& event : events) {
                if (auto* transfer = std::get_if<TransferEvent>(&event))
                    failed.push_back(*transfer);
                if (auto* down = std::get_if<EndpointDown>(&event)) downs.push_back(*down);
            }
        }
    }
    void wait_done(std::uint64_t id) {
        wait([&] { return done.contains(id); });
    }
    void wait_failed(std::size_t count) {
        wait([&] { return failed.size() >= count; });
    }
    // Writes as transfer 1, which `attempts` attempts one after the other fail with `status`.
    void fail_a_write(std::uint64_t attempts, verbs::WcStatus status) {
        for (std::uint64_t attempt = 1; attempt <= attempts; ++attempt) {
            scripts[0]->fail_next(status);
            if (attempt == 1) {
                write(1, 0, kSlice);
            } else {
                establish(attempt);
            }
            wait_down(attempt);
            session->fenced({attempt, 0});
        }
        wait_failed(1);
    }
    void wait_down(std::size_t count) {
        wait([&] { return downs.size() >= count; });
    }
    bool same() const { return source == target; }

    // Before start():
    EngineOptions options;
    std::uint64_t nearest = 0;  // devices next to the source
    bool relaxed = false;       // writes need a read after them

    std::vector<std::shared_ptr<Script>> scripts;
    std::vector<std::uint8_t> source = std::vector<std::uint8_t>(64 * kSlice + 17);
    std::vector<std::uint8_t> target = std::vector<std::uint8_t>(64 * kSlice + 17);
    std::vector<std::uint64_t> ids;
    std::shared_ptr<TransferEngine> engine;
    std::shared_ptr<Session> session;
    std::set<std::uint64_t> done;
    std::vector<TransferEvent> failed;
    std::vector<EndpointDown> downs;
};

}  // namespace aioflagcx::engine
