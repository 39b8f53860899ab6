// Finding each other: attributes, the choice of path, deadlines, forks.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <functional>

#include "common/socket_address.h"
#include "soft_fixture.h"
#include "verbs/soft/token.h"

namespace aioflagcx::verbs::soft {
namespace {

int error_of(const std::function<void()>& call) {
    try {
        call();
    } catch (const NativeError& error) {
        return error.error();
    }
    return 0;
}

SoftOptions with_paths(std::vector<std::string> paths) {
    SoftOptions options;
    options.paths = std::move(paths);
    return options;
}

class SoftConnect : public OnPath {};
SOFT_ON_EVERY_PATH(SoftConnect);

TEST_P(SoftConnect, AFencedResponderRefuses) {
    Side a(options());
    Side b(options());
    b.qp->accept(a.qp->local_attributes());
    const Attributes attributes = b.qp->local_attributes();
    b.qp->fence(soon());
    EXPECT_EQ(error_of([&] { a.qp->connect(attributes, soon()); }), ECONNREFUSED);
    EXPECT_EQ(a.qp->state(), QpState::Init);
}

TEST_P(SoftConnect, AWrongTokenIsRefused) {
    Side a(options());
    Side b(options());
    b.qp->accept(a.qp->local_attributes());
    Attributes attributes = b.qp->local_attributes();
    std::get<Bytes>(attributes["token"])[3] ^= 1;
    EXPECT_EQ(error_of([&] { a.qp->connect(attributes, soon()); }), ECONNREFUSED);
    // The mistake cost nobody else anything.
    a.qp->connect(b.qp->local_attributes(), soon());
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 10);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
}

TEST_P(SoftConnect, ASecondInitiatorIsRefused) {
    Side a(options());
    Side b(options());
    connect(*a.qp, *b.qp);
    Side c(options());
    EXPECT_EQ(error_of([&] { c.qp->connect(b.qp->local_attributes(), soon()); }), ECONNREFUSED);
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 10);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
}

TEST(SoftPaths, TheInitiatorsPreferenceDecides) {
    Side a(with_paths({"tcp", "process"}));
    Side b(with_paths({"process", "local", "tcp"}));
    connect(*a.qp, *b.qp);
    EXPECT_STREQ(a.qp->path(), "tcp");
    auto back_initiator = b.make_qp();
    auto back_responder = a.make_qp();
    connect(*back_initiator, *back_responder);
    EXPECT_STREQ(back_initiator->path(), "process");
}

TEST(SoftPaths, AnotherProcessIsReachedByTcpOnly) {
    Side a(with_paths({"process", "tcp"}));
    Side b(with_paths({"process", "tcp"}));
    Attributes remote = a.qp->local_attributes();
    std::get<Bytes>(remote["process"])[0] ^= 1;
    b.qp->accept(remote);
    EXPECT_STREQ(b.qp->path(), "tcp");
}

TEST(SoftPaths, NoneInCommonNamesBothLists) {
    Side a(with_paths({"process"}));
    Side b(with_paths({"tcp"}));
    try {
        b.qp->accept(a.qp->local_attributes());
        FAIL();
    } catch (const NativeError& error) {
        EXPECT_NE(error.detail().find("process"), std::string::npos);
        EXPECT_NE(error.detail().find("tcp"), std::string::npos);
    }
    // A refused peer leaves the QP as it was.
    EXPECT_EQ(b.qp->state(), QpState::Init);
}

TEST(SoftPaths, OptionsThatLeaveNoPathAreRefused) {
    EXPECT_THROW(open_soft_device(with_paths({})), NativeError);
    EXPECT_THROW(open_soft_device(with_paths({"tcp", "carrier pigeon"})), NativeError);
}

TEST(SoftAttributesFromTheNetwork, EveryMissingOrMalformedValueIsRefused) {
    Side a(with_paths({"process", "tcp"}));
    const Attributes good = a.qp->local_attributes();
    const std::vector<AttributeValue> wrong = {std::uint64_t{1} << 40,
                                               std::string("x"),
                                               std::string(100000, 'x'),
                                               std::string("t\0cp", 4),
                                               Bytes(15),
                                               Bytes(17),
                                               std::vector<std::string>(1000, "tcp"),
                                               std::vector<std::string>{std::string(1000, 'x')},
                                               std::uint64_t{0}};
    for (const auto& [key, value] : good) {
        Side b(with_paths({"process", "tcp"}));
        Attributes map = good;
        map.erase(key);
        EXPECT_THROW(b.qp->accept(map), NativeError) << key;
        for (const AttributeValue& bad : wrong) {
            // Some of them are right for the key they meet: no crash is what counts then.
            map[key] = bad;
            try {
                b.make_qp()->accept(map);
            } catch (const NativeError&) {
            }
            try {
                b.make_qp()->connect(map, Clock::now());
            } catch (const NativeError&) {
            }
        }
    }
    Side c(with_paths({"process", "tcp"}));
    Attributes more = good;
    more["from a later version"] = std::uint64_t{1};
    c.qp->accept(more);
}

TEST(SoftTcpConnect, ASilentPeerTimesOutAtTheDeadline) {
    std::uint16_t port = 0;
    const UniqueFd silent = listen_on("127.0.0.1", &port);
    Side a(with_paths({"tcp"}));
    Side b(with_paths({"tcp"}));
    b.qp->accept(a.qp->local_attributes());
    Attributes attributes = b.qp->local_attributes();
    attributes["port"] = std::uint64_t{port};
    const auto start = Clock::now();
    const Deadline deadline = start + std::chrono::milliseconds(200);
    EXPECT_EQ(error_of([&] { a.qp->connect(attributes, deadline); }), ETIMEDOUT);
    EXPECT_GE(Clock::now(), deadline);
    EXPECT_LT(Clock::now(), deadline + std::chrono::seconds(5));
}

TEST(SoftTcpConnect, NobodyListeningIsRefused) {
    Side a(with_paths({"tcp"}));
    Attributes attributes;
    {
        Side b(with_paths({"tcp"}));
        b.qp->accept(a.qp->local_attributes());
        attributes = b.qp->local_attributes();
    }
    EXPECT_EQ(error_of([&] { a.qp->connect(attributes, soon()); }), ECONNREFUSED);
}

TEST(SoftTcpConnect, WorksOverIpv6) {
    SoftOptions options = with_paths({"tcp"});
    options.bind_address = "::1";
    Side b(options);
    Side a(with_paths({"tcp"}));
    connect(*a.qp, *b.qp);
    a.fill(1);
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 100000);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    EXPECT_EQ(std::memcmp(a.buffer.data(), b.buffer.data(), 100000), 0);
}

TEST(SoftTcpConnect, AddressesThatAreNoNumbersAreRefused) {
    SoftOptions options;
    options.bind_address = "localhost";
    EXPECT_THROW(open_soft_device(options), NativeError);
    options.bind_address = "127.0.0.1";
    options.advertise_address = "example.org";
    EXPECT_THROW(open_soft_device(options), NativeError);
    options.advertise_address = "192.0.2.7";
    Side a(options);
    EXPECT_EQ(std::get<std::string>(a.qp->local_attributes()["host"]), "192.0.2.7");
}

TEST(SoftProcessToken, StaysTheSameAndChangesAcrossFork) {
    const Token mine = process_token();
    EXPECT_EQ(process_token(), mine);
    const pid_t child = ::fork();
    if (child == 0) ::_exit(process_token() == mine ? 1 : 0);
    int status = -1;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_EQ(status, 0);
    EXPECT_EQ(process_token(), mine);
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
