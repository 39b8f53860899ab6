// Whatever comes to the data port, or from a responder's, costs at most that connection.
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <functional>

#include "common/socket_address.h"
#include "soft_fixture.h"
#include "verbs/soft/limits.h"
#include "verbs/soft/token.h"
#include "verbs/soft/wire.h"

namespace aioflagcx::verbs::soft {
namespace {

// A blocking socket that speaks whatever a test wants.
class Raw {
  public:
    explicit Raw(std::uint16_t port) {
        const SocketAddress to = SocketAddress::numeric("127.0.0.1", port);
        fd_ = UniqueFd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
        EXPECT_EQ(::connect(fd_.get(), to.get(), to.length), 0);
        // What never comes is a failure, not a hang.
        const timeval patience{kPatience.count(), 0};
        ::setsockopt(fd_.get(), SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    }
    explicit Raw(UniqueFd fd) : fd_(std::move(fd)) {}

    template <typename T>
    void send(const T& value) {
        send_bytes(&value, sizeof value);
    }
    void send_bytes(const void* bytes, std::size_t size) {
        // Failing is fine: the other side may have closed already.
        [[maybe_unused]] auto ignored = ::send(fd_.get(), bytes, size, MSG_NOSIGNAL);
    }
    // Reads one T; false when the stream ends first.
    template <typename T>
    bool receive(T& value) {
        return ::recv(fd_.get(), &value, sizeof value, MSG_WAITALL) == sizeof value;
    }
    void expect_closed(std::chrono::milliseconds patience = kPatience) {
        pollfd entry{fd_.get(), POLLIN, 0};
        ASSERT_EQ(::poll(&entry, 1, static_cast<int>(patience.count())), 1);
        char bytes[4096];
        while (::recv(fd_.get(), bytes, sizeof bytes, 0) > 0) {
        }
    }

  private:
    UniqueFd fd_;
};

std::uint16_t port_of(const QueuePair& qp) {
    return static_cast<std::uint16_t>(std::get<std::uint64_t>(qp.local_attributes()["port"]));
}

wire::Hello hello_for(const QueuePair& responder, std::uint16_t stream = 0) {
    wire::Hello hello{wire::kHelloMagic, wire::kVersion, stream, {}};
    const Attributes attributes = responder.local_attributes();
    const auto& token = std::get<Bytes>(attributes.at("token"));
    std::copy(token.begin(), token.end(), hello.token.begin());
    return hello;
}

wire::Request write_request(const Side& target, std::uint32_t length, std::uint64_t offset = 0) {
    return {static_cast<std::uint8_t>(WrOpcode::RdmaWrite), {}, length, target.mr->rkey(), 0,
            address(target.buffer.data()) + offset};
}

// A pair that works, beside which the hostile things happen.
class SoftPort : public ::testing::Test {
  protected:
    SoftPort() : a(options_for("tcp")), b(options_for("tcp")) { connect(*a.qp, *b.qp); }
    ~SoftPort() override {
        const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 1000, 1, 0, 5000);
        a.qp->post_send({&wr, 1});
        EXPECT_EQ(a.take_one().status, WcStatus::Success) << "the neighbour was hurt";
    }
    // A responder of b that has accepted somebody with two streams, and a stream to it.
    std::unique_ptr<QueuePair> accepted() {
        auto qp = b.make_qp();
        qp->accept(a.make_qp()->local_attributes());
        return qp;
    }
    Raw stream_to(const QueuePair& qp, std::uint16_t stream = 0) {
        Raw raw(port_of(qp));
        raw.send(hello_for(qp, stream));
        wire::HelloReply reply{};
        EXPECT_TRUE(raw.receive(reply));
        EXPECT_EQ(reply.magic, wire::kHelloMagic);
        EXPECT_EQ(reply.stream, stream);
        return raw;
    }

    Side a;
    Side b;
};

TEST_F(SoftPort, BytesThatAreNoHelloCloseTheConnection) {
    std::mt19937 random(1);
    for (int i = 0; i < 50; ++i) {
        Raw raw(port_of(*b.qp));
        std::vector<std::uint8_t> noise(24 + i * 100);
        for (auto& byte : noise) byte = static_cast<std::uint8_t>(random());
        raw.send_bytes(noise.data(), noise.size());
        raw.expect_closed();
    }
}

TEST_F(SoftPort, AHelloMustNameTheVersionAKnownTokenAndAFreeStream) {
    const auto qp = accepted();
    const std::vector<std::function<void(wire::Hello&)>> mistakes = {
        [](wire::Hello& hello) { hello.magic ^= 1; },
        [](wire::Hello& hello) { hello.version = 2; },
        [](wire::Hello& hello) { hello.token[0] ^= 1; },
        [](wire::Hello& hello) { hello.stream = 2; },
        [](wire::Hello& hello) { hello.stream = 0xffff; },
    };
    for (const auto& mistake : mistakes) {
        Raw raw(port_of(*qp));
        wire::Hello hello = hello_for(*qp);
        mistake(hello);
        raw.send(hello);
        raw.expect_closed();
    }
    Raw first = stream_to(*qp, 1);
    Raw second(port_of(*qp));
    second.send(hello_for(*qp, 1));
    second.expect_closed();
    // The first claim still works.
    first.send(wire::FrameHeader{wire::kFrameMagic, 1, 4});
    first.send(write_request(b, 4));
    first.send(std::uint32_t{0x01020304});
    wire::Response response{};
    ASSERT_TRUE(first.receive(response));
    EXPECT_EQ(response.kind, wire::ResponseKind::Ack);
    EXPECT_EQ(response.index, 1U);
}

TEST_F(SoftPort, AConnectionThatSaysNothingIsClosedInTime) {
    Raw raw(port_of(*b.qp));
    raw.send(std::uint32_t{wire::kHelloMagic});
    const auto start = Clock::now();
    raw.expect_closed();
    EXPECT_GE(Clock::now() - start, kHelloTimeout - std::chrono::seconds(1));
}

TEST_F(SoftPort, SilentConnectionsDoNotKeepOthersOut) {
    std::vector<std::unique_ptr<Raw>> silent;
    for (std::size_t i = 0; i < kMaxHellos + 50; ++i) {
        silent.push_back(std::make_unique<Raw>(port_of(*b.qp)));
    }
    auto initiator = a.make_qp();
    auto responder = b.make_qp();
    connect(*initiator, *responder);
    EXPECT_EQ(initiator->state(), QpState::Rts);
    silent.front()->expect_closed(std::chrono::milliseconds(3000));
}

TEST_F(SoftPort, MalformedFramesEndTheirQueuePairOnly) {
    struct Frame {
        wire::FrameHeader header;
        wire::Request request;
    };
    const Frame good{{wire::kFrameMagic, 1, 8}, write_request(b, 8)};
    const std::vector<std::function<void(Frame&)>> mistakes = {
        [](Frame& frame) { frame.header.magic ^= 1; },
        [](Frame& frame) { frame.header.count = 0; },
        [](Frame& frame) { frame.header.count = kFrameRequests + 1; },
        [](Frame& frame) { frame.header.count = 0xffff; },
        [](Frame& frame) { frame.header.payload = 9; },
        [](Frame& frame) { frame.request.opcode = 3; },
        [](Frame& frame) { frame.request.opcode = 255; },
        [](Frame& frame) { frame.request.length = frame.header.payload = 0xffffffff; },
    };
    for (const auto& mistake : mistakes) {
        const auto qp = accepted();
        Raw raw = stream_to(*qp);
        Raw other = stream_to(*qp, 1);
        Frame frame = good;
        mistake(frame);
        raw.send(frame);
        raw.expect_closed();
        other.expect_closed();
        EXPECT_EQ(qp->state(), QpState::Err);
    }
    EXPECT_EQ(std::count(b.buffer.begin(), b.buffer.end(), 0), 1 << 20);
}

TEST_F(SoftPort, RandomFramesAreSurvived) {
    std::mt19937 random(2);
    for (int round = 0; round < 300; ++round) {
        const auto qp = accepted();
        const RecvWr receives[] = {b.receive(1, 100), b.receive(2)};
        qp->post_recv(receives);
        Raw raw = stream_to(*qp);
        // Plausible enough to get past the first checks, and cut off anywhere.
        std::vector<std::uint8_t> bytes;
        const auto append = [&bytes](const auto& value) {
            const auto* raw_bytes = reinterpret_cast<const std::uint8_t*>(&value);
            bytes.insert(bytes.end(), raw_bytes, raw_bytes + sizeof value);
        };
        for (int frame = 0; frame < 5; ++frame) {
            const auto count = static_cast<std::uint16_t>(1 + random() % 4);
            std::vector<wire::Request> requests;
            std::uint32_t payload = 0;
            for (int i = 0; i < count; ++i) {
                wire::Request request = write_request(b, random() % 200, random() % 1000);
                constexpr WrOpcode kOpcodes[] = {WrOpcode::RdmaWrite, WrOpcode::RdmaWriteWithImm,
                                                 WrOpcode::Send, WrOpcode::RdmaRead};
                request.opcode = static_cast<std::uint8_t>(kOpcodes[random() % 4]);
                if (random() % 16 == 0) request.rkey ^= 1U << random() % 32;
                if (request.opcode != static_cast<std::uint8_t>(WrOpcode::RdmaRead)) {
                    payload += request.length;
                }
                requests.push_back(request);
            }
            append(wire::FrameHeader{wire::kFrameMagic, count, payload});
            for (const auto& request : requests) append(request);
            for (std::uint32_t i = 0; i < payload; ++i) append(static_cast<std::uint8_t>(random()));
        }
        if (random() % 2 == 0) bytes[random() % bytes.size()] ^= 0xff;
        bytes.resize(1 + random() % bytes.size());
        for (std::size_t at = 0; at < bytes.size();) {
            const std::size_t size = std::min<std::size_t>(1 + random() % 700, bytes.size() - at);
            raw.send_bytes(bytes.data() + at, size);
            at += size;
        }
    }
    // Only the registered part the requests named was touched.
    EXPECT_EQ(std::count(b.buffer.begin() + 1300, b.buffer.begin() + 5000, 0), 3700);
}

TEST_F(SoftPort, ReadsThatNobodyTakesCostBoundedMemoryAndNobodyElse) {
    const auto qp = accepted();
    Raw raw = stream_to(*qp);
    std::vector<std::uint8_t> frame;
    wire::FrameHeader header{wire::kFrameMagic, kFrameRequests, 0};
    wire::Request read = write_request(b, 1 << 20);
    read.opcode = static_cast<std::uint8_t>(WrOpcode::RdmaRead);
    for (std::uint32_t i = 0; i < 40; ++i) {  // 1,280 reads of 1 MiB
        raw.send(header);
        for (std::uint32_t j = 0; j < kFrameRequests; ++j) raw.send(read);
    }
    const SendWr wr = a.request(WrOpcode::RdmaWrite, b, 1000);
    a.qp->post_send({&wr, 1});
    EXPECT_EQ(a.take_one().status, WcStatus::Success);
    qp->fence(soon());
    raw.expect_closed();
}

// A responder under the test's control: what it answers must not harm the initiator.
class SoftAnswers : public ::testing::Test {
  protected:
    SoftAnswers() : a(options_for("tcp", 1)), victim(options_for("tcp", 1)) {
        listener = listen_on("127.0.0.1", &port);
        victim.qp->accept(a.qp->local_attributes());
    }
    // Connects a new QP of a to the test.
    Raw serve(std::unique_ptr<QueuePair>& qp) {
        Attributes attributes = victim.qp->local_attributes();
        attributes["port"] = std::uint64_t{port};
        qp = a.make_qp();
        std::unique_ptr<Raw> raw;
        std::thread server([&] {
            pollfd entry{listener.get(), POLLIN, 0};
            ::poll(&entry, 1, -1);
            raw = std::make_unique<Raw>(UniqueFd(::accept(listener.get(), nullptr, nullptr)));
            wire::Hello hello{};
            raw->receive(hello);
            raw->send(wire::HelloReply{wire::kHelloMagic, wire::kVersion, hello.stream});
        });
        qp->connect(attributes, soon());
        server.join();
        return std::move(*raw);
    }

    Side a;
    Side victim;
    UniqueFd listener;
    std::uint16_t port = 0;
};

TEST_F(SoftAnswers, NonsenseIsABadResponseError) {
    const auto response = [](wire::ResponseKind kind, std::uint8_t detail, std::uint32_t length,
                             std::uint64_t index) {
        return wire::Response{wire::kResponseMagic, kind, detail, length, index};
    };
    using Kind = wire::ResponseKind;
    wire::Response wrong_magic = response(Kind::Ack, 0, 0, 1);
    wrong_magic.magic ^= 1;
    const std::vector<wire::Response> answers = {
        wrong_magic,
        response(Kind::Ack, 0, 0, 3),  // more than was sent
        response(Kind::Ack, 0, 0, ~std::uint64_t{0}),
        response(Kind::Ack, 0, 0, 2),        // a read without its data
        response(Kind::ReadData, 0, 10, 0),  // for a write
        response(Kind::ReadData, 0, 0, 1),
        response(Kind::ReadData, 0, 10, 5),
        response(Kind::NotReady, 0, 0, 0),  // for a write
        response(Kind::NotReady, 0, 0, 7),
        response(Kind::Nack, 0, 0, 0),  // "success"
        response(Kind::Nack, 5, 0, 0),
        response(Kind::Nack, 255, 0, 0),
        response(static_cast<Kind>(0), 0, 0, 0),
        response(static_cast<Kind>(77), 0, 0, 0),
    };
    for (const wire::Response& answer : answers) {
        std::unique_ptr<QueuePair> qp;
        Raw raw = serve(qp);
        const auto before = a.buffer;
        const SendWr requests[] = {a.request(WrOpcode::RdmaWrite, victim, 100, 0),
                                   a.request(WrOpcode::RdmaRead, victim, 100, 1)};
        ASSERT_EQ(qp->post_send(requests), 2U);
        raw.send(answer);
        const auto done = a.take(2);
        EXPECT_EQ(done[0].status == WcStatus::Success ? done[1].status : done[0].status,
                  WcStatus::BadRespErr);
        raw.expect_closed();
        EXPECT_EQ(a.buffer, before);
    }
}

TEST_F(SoftAnswers, MoreReadDataThanAskedForIsNotStored) {
    std::unique_ptr<QueuePair> qp;
    Raw raw = serve(qp);
    const SendWr wr = a.request(WrOpcode::RdmaRead, victim, 100, 0);
    ASSERT_EQ(qp->post_send({&wr, 1}), 1U);
    raw.send(wire::Response{wire::kResponseMagic, wire::ResponseKind::ReadData, 0, 1000, 0});
    const std::vector<std::uint8_t> data(1000, 0xAB);
    raw.send_bytes(data.data(), data.size());
    EXPECT_EQ(a.take_one().status, WcStatus::BadRespErr);
    EXPECT_EQ(std::count(a.buffer.begin() + 100, a.buffer.end(), 0), (1 << 20) - 100);
}

TEST_F(SoftAnswers, RandomAnswersAreSurvived) {
    std::mt19937 random(3);
    for (int round = 0; round < 300; ++round) {
        std::unique_ptr<QueuePair> qp;
        Raw raw = serve(qp);
        std::vector<SendWr> requests;
        for (std::uint64_t i = 0; i < 8; ++i) {
            constexpr WrOpcode kOpcodes[] = {WrOpcode::RdmaWrite, WrOpcode::RdmaRead,
                                             WrOpcode::RdmaRead, WrOpcode::Send};
            requests.push_back(a.request(kOpcodes[random() % 4], victim, random() % 300, i));
        }
        ASSERT_EQ(qp->post_send(requests), requests.size());
        for (int i = 0; i < 6; ++i) {
            raw.send(wire::Response{wire::kResponseMagic,
                                    static_cast<wire::ResponseKind>(1 + random() % 4),
                                    static_cast<std::uint8_t>(random() % 14),
                                    static_cast<std::uint32_t>(random() % 400), random() % 9});
            const std::vector<std::uint8_t> data(random() % 300);
            if (random() % 2 == 0) raw.send_bytes(data.data(), data.size());
        }
        raw = Raw(UniqueFd());  // closes
        for (const auto& wc : a.take(8)) EXPECT_LT(wc.wr_id, 8U);
        EXPECT_EQ(qp->state(), QpState::Err);
    }
}

}  // namespace
}  // namespace aioflagcx::verbs::soft
