"""The workers' halves of the connector, prefill in this process or in one of its own."""

from __future__ import annotations

import contextlib
import itertools
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from integrations.processes import until
from integrations.vllm.servers import Child, Group, Server, child, free_ports

from aioflagcx.errors import HandshakeRejected
from aioflagcx.integrations.vllm.scheduler import Release, Source, Step

Servers = Callable[..., Server]
Children = Callable[..., Child]

MiB = 1 << 20


@pytest.fixture
def servers() -> Iterator[Servers]:
    """Makes servers, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(*args: Any, **kwargs: Any) -> Server:
            server = Server(*args, **kwargs)
            stack.callback(server.close)
            return server

        yield make


@pytest.fixture
def children() -> Iterator[Children]:
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(child(*args, **kwargs))


def filled(server: Server, seed: int = 1) -> Server:
    random = np.random.default_rng(seed)
    for cache in server.caches:
        cache[:] = random.integers(1, 256, cache.shape, np.uint8)
    return server


def source(transfer: str, port: int, ranks: int = 1) -> Source:
    return Source(transfer, "127.0.0.1", port, ranks)


@pytest.mark.parametrize("first", ["prefill", "decode"])
def test_blocks_arrive_and_no_others_change_whoever_comes_first(
    servers: Servers, first: str
) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    src, dst = [3, 4, 5, 9], [7, 8, 2, 30]
    if first == "prefill":
        prefill.offer("p", src, transfer="t")
        decode.load("d", source("t", port), dst)
    else:
        decode.load("d", source("t", port), dst)
        prefill.offer("p", src, transfer="t")
    decode.wait_received("d")
    prefill.wait_sent("p")
    expected = np.zeros_like(decode.caches[0])
    expected[:, dst] = prefill.caches[0][:, src]
    assert (decode.caches[0] == expected).all()
    assert not decode.invalid and not decode.failed
    assert prefill.stats["sent_bytes"] == expected[:, dst].nbytes
    assert (prefill.stats["sent_requests"], decode.stats["received_requests"]) == (1, 1)


def test_a_decode_that_has_the_prefix_gets_the_last_blocks(servers: Servers) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    prefill.offer("r", [1, 2, 3, 4])
    decode.load("r", source("r", port), [10, 11])
    decode.wait_received("r")
    assert (decode.caches[0][:, [10, 11]] == prefill.caches[0][:, [3, 4]]).all()


@pytest.mark.parametrize(
    ("src_ranks", "dst_ranks", "heads"), [(1, 2, 4), (2, 1, 4), (4, 2, 4), (2, 4, 2), (4, 2, 1)]
)
def test_each_rank_gets_its_heads_from_any_number_of_ranks(
    servers: Servers, src_ranks: int, dst_ranks: int, heads: int
) -> None:
    port = free_ports(src_ranks)
    groups = (Group(heads=heads),)
    whole = np.random.default_rng(5).integers(1, 256, groups[0].shape(1), np.uint8)

    def part(rank: int, ranks: int) -> Any:
        each = max(heads // ranks, 1)
        first = rank * heads // ranks
        return whole[:, :, first : first + each]

    for_each = [
        servers("prefill", port, groups=groups, rank=rank, ranks=src_ranks)
        for rank in range(src_ranks)
    ]
    for rank, prefill in enumerate(for_each):
        prefill.caches[0][:] = part(rank, src_ranks)
        prefill.offer("r", [1, 2])
    decodes = [
        servers("decode", groups=groups, rank=rank, ranks=dst_ranks) for rank in range(dst_ranks)
    ]
    for decode in decodes:
        decode.load("r", source("r", port, src_ranks), [8, 5])
    for rank, decode in enumerate(decodes):
        decode.wait_received("r")
        assert not decode.invalid, decode.reasons()
        assert (decode.caches[0][:, [8, 5]] == part(rank, dst_ranks)[:, [1, 2]]).all()
    for prefill in for_each:
        prefill.wait_sent("r")


@pytest.mark.parametrize(("src_ranks", "dst_ranks"), [(1, 2), (2, 1), (4, 2), (2, 4)])
def test_groups_of_different_heads_go_from_any_number_of_ranks_to_any_other(
    servers: Servers, src_ranks: int, dst_ranks: int
) -> None:
    port = free_ports(src_ranks)
    groups = Group(heads=4), Group(layers=2, blocks=16, heads=2)
    random = np.random.default_rng(6)
    wholes = [random.integers(1, 256, group.shape(1), np.uint8) for group in groups]

    def part(group: int, rank: int, ranks: int) -> Any:
        heads = groups[group].heads
        first = rank * heads // ranks
        return wholes[group][:, :, first : first + max(heads // ranks, 1)]

    for rank in range(src_ranks):
        prefill = servers("prefill", port, groups=groups, rank=rank, ranks=src_ranks)
        for group, cache in enumerate(prefill.caches):
            cache[:] = part(group, rank, src_ranks)
        prefill.offer("r", [1, 2, 3], [9])
    decodes = [
        servers("decode", groups=groups, rank=rank, ranks=dst_ranks) for rank in range(dst_ranks)
    ]
    for decode in decodes:
        decode.load("r", source("r", port, src_ranks), [8, 5, 6], [4])
    for rank, decode in enumerate(decodes):
        decode.wait_received("r")
        assert not decode.failed, decode.reasons()
        for group, (src, dst) in enumerate((([1, 2, 3], [8, 5, 6]), ([9], [4]))):
            expected = np.zeros_like(decode.caches[group])
            expected[:, dst] = part(group, rank, dst_ranks)[:, src]
            assert (decode.caches[group] == expected).all()


def test_groups_have_their_own_blocks_and_failures_are_told_by_request(servers: Servers) -> None:
    port = free_ports()
    groups = Group(), Group(layers=2, blocks=16, heads=2)
    prefill = filled(servers("prefill", port, groups=groups))
    decode = servers("decode", groups=groups)
    prefill.offer("r", [1, 2, 3], [5])
    decode.load("r", source("r", port), [4, 5, 6], [15])
    decode.wait_received("r")
    assert (decode.caches[0][:, [4, 5, 6]] == prefill.caches[0][:, [1, 2, 3]]).all()
    assert (decode.caches[1][:, 15] == prefill.caches[1][:, 5]).all()
    prefill.step(Step(dropped=[("gone", "prefill ended it: FINISHED_ABORTED")]))
    decode.load("x", source("gone", port), [4], [3])
    decode.wait_received("r", "x")
    assert decode.failed == {"x"} and not decode.invalid


def test_exactly_the_blocks_of_the_failed_request_are_invalid(servers: Servers) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    decode.load("bad", source("bad", port), [1, 2])
    decode.load("good", source("good", port), [3, 4])
    prefill.step(Step(dropped=[("bad", "prefill ended it: FINISHED_ABORTED")]))
    prefill.offer("good", [5, 6])
    decode.wait_received("bad", "good")
    assert decode.invalid == {1, 2}
    [(request, peer, reason)] = decode.reasons()
    assert (request, peer) == ("bad", f"127.0.0.1:{port}")
    assert "FINISHED_ABORTED" in reason


@pytest.mark.parametrize(
    ("groups", "dst", "words"),
    [
        ((Group(),), [1, 2, 3], "prefill has 2 blocks"),
        ((Group(layers=2),), [1], "different layers"),
        ((Group(heads=2),), [1], "heads: 4 on prefill, 2 on decode"),
    ],
)
def test_what_does_not_fit_fails_with_the_reason_before_any_byte(
    servers: Servers, groups: Any, dst: list[int], words: str
) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode", groups=groups)
    prefill.offer("r", [1, 2])
    decode.load("r", source("r", port), dst)
    decode.wait_received("r")
    assert decode.invalid == set(dst)
    assert words in decode.reasons()[0][2]
    assert not any(cache.any() for cache in decode.caches)
    prefill.wait_sent("r")


def test_prompts_of_other_lengths_are_not_taken_for_each_other(servers: Servers) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    prefill.offer("r", [1, 2], tokens=8)
    decode.load("r", source("r", port), [1], tokens=4)
    decode.wait_received("r")
    assert decode.invalid == {1}
    assert "computed a prompt of 8 tokens, decode's has 4" in decode.reasons()[0][2]
    assert not decode.caches[0].any()
    prefill.wait_sent("r")


@pytest.mark.parametrize(
    ("host", "ranks", "words"),
    [
        ("http://10.0.0.1", 1, "it could not be asked for"),
        ("\ud800", 1, "it could not be asked for"),
        ("127.0.0.1", 3, "4 heads are not divided evenly among 3 ranks"),
    ],
)
def test_a_source_that_cannot_be_is_a_failure_of_its_request_alone(
    servers: Servers, host: str, ranks: int, words: str
) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    bad = Source("bad", host, 20_000, ranks)
    decode.load("bad", bad, [1])
    decode.step(Step(aborts=[("bad", "test")], releases=[Release("also bad", bad)]))
    decode.load("worse", bad, [2])
    prefill.offer("good", [5])
    decode.load("good", source("good", port), [3])
    decode.wait_received("bad", "worse", "good")
    assert decode.invalid - {1} == {2}  # the first one may have been aborted before
    assert words in str(decode.reasons())
    decode.worker.close()


def test_a_fetch_survives_a_session_that_is_fenced_as_soon_as_it_is_there(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    engine = prefill.worker._prefill._engine
    connect, times = engine.connect, 3

    async def fenced(session_id: str, **options: Any) -> Any:
        nonlocal times
        times -= 1
        if times >= 0:
            raise HandshakeRejected("fenced")
        return await connect(session_id, **options)

    monkeypatch.setattr(engine, "connect", fenced)
    prefill.offer("r", [1])
    decode.load("r", source("r", port), [2])
    decode.wait_received("r")
    assert not decode.invalid, decode.reasons()
    assert times < 0


def test_what_was_lost_with_the_side_channels_connection_is_said_again(
    servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aioflagcx.integrations.vllm.decode._CHECK", 0.02)
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    with Cut(port) as cut:
        decode.load("r", source("r", cut.port), [1])
        until(lambda: prefill.worker._prefill._writers)
        cut.now()
        prefill.offer("r", [4])  # asks on a connection that has ended
        decode.wait_received("r")
    assert not decode.invalid, decode.reasons()
    assert (decode.caches[0][:, 1] == prefill.caches[0][:, 4]).all()
    prefill.wait_sent("r")


class Cut:
    """A port that leads to another one; connections can be cut, and new ones lead there again."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept)]

    def __enter__(self) -> Cut:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.now()
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._sockets):
            each.close()

    def now(self) -> None:
        for each in tuple(self._sockets):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                there = self._listener.accept()[0]
                self._sockets.append(there)
                back = socket.create_connection(("127.0.0.1", self._to))
                self._sockets.append(back)
                for pair in ((there, back), (back, there)):
                    self._threads.append(threading.Thread(target=self._pass, args=pair))
                    self._threads[-1].start()

    @staticmethod
    def _pass(one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(65_536):
                other.sendall(data)
        with contextlib.suppress(OSError):
            other.shutdown(socket.SHUT_RDWR)


def test_what_decode_does_not_need_is_free_on_prefill(servers: Servers) -> None:
    port = free_ports()
    prefill, decode = servers("prefill", port), servers("decode")
    prefill.offer("early", [1])
    decode.step(Step(releases=[Release("d", source("early", port))]))
    prefill.wait_sent("early")
    decode.step(Step(releases=[Release("e", source("late", port))]))
    decode.load("sign", source("sign", port), [1])  # comes behind it
    prefill.offer("sign", [1])
    decode.wait_received("sign")
    prefill.offer("late", [2])
    prefill.wait_sent("early", "sign", "late")


def test_what_nobody_fetches_is_free_after_a_while_and_cannot_be_had(servers: Servers) -> None:
    port = free_ports()
    prefill, decode = servers("prefill", port, abort_timeout=0.05), servers("decode")
    prefill.offer("r", [1])
    prefill.wait_sent("r")
    decode.load("r", source("r", port), [1])
    decode.wait_received("r")
    assert "nobody has fetched all of it within 0.05 s" in decode.reasons()[0][2]


def test_waiting_for_prefill_has_a_limit_on_either_side(servers: Servers) -> None:
    port = free_ports()
    servers("prefill", port, abort_timeout=0.05)
    decode = servers("decode")
    decode.load("a", source("a", port), [1])
    decode.wait_received("a")
    assert "prefill has not computed it within 0.05 s" in decode.reasons()[0][2]
    other = free_ports()
    servers("prefill", other)
    hasty = servers("decode", abort_timeout=0.05)
    hasty.load("b", source("b", other), [2])
    hasty.wait_received("b")
    assert hasty.invalid == {2}
    assert hasty.reasons()[0][2] == "not everything had come within 0.05 s"


def test_a_prefill_that_is_not_there_fails_the_request_within_the_limit(servers: Servers) -> None:
    port = free_ports()
    decode = servers("decode", answer_timeout=0.05)
    decode.load("r", source("r", port), [1])
    decode.wait_received("r")
    assert decode.invalid == {1}
    [(_, peer, reason)] = decode.reasons()
    assert peer == f"127.0.0.1:{port}" and "has not answered within 0.05 s" in reason


def test_an_aborted_load_is_reported_without_invalid_blocks_and_prefill_goes_on(
    servers: Servers,
) -> None:
    port = free_ports()
    prefill, decode = filled(servers("prefill", port)), servers("decode")
    decode.load("r", source("r", port), [1])
    decode.step(Step(aborts=[("r", "vLLM ended it: FINISHED_ABORTED"), ("unknown", "")]))
    decode.wait_received("r")
    assert not decode.invalid and not decode.failed
    until(lambda: "FINISHED_ABORTED" in str(prefill.reasons()))
    prefill.offer("r", [1])
    prefill.wait_sent("r")
    assert not decode.caches[0].any()


def test_two_requests_with_one_transfer_id_do_not_keep_blocks(servers: Servers) -> None:
    prefill = servers("prefill", free_ports())
    prefill.offer("a", [1], transfer="t")
    prefill.offer("b", [2], transfer="t")
    prefill.wait_sent("b")


def test_a_taken_port_is_an_error_that_names_it(servers: Servers) -> None:
    port = free_ports()
    servers("prefill", port)
    with pytest.raises(OSError, match=f"cannot listen at tcp://127.0.0.1:{port}"):
        servers("prefill", port)


BIG = Group(layers=4, blocks=4096, heads=64)  # 8 KiB a block
ALL = list(range(BIG.blocks))
SIZE = int(np.prod(BIG.shape(1)))


def stopped_halfway(
    process: Child,
    parts: Sequence[Any],
    begin: Callable[[str], object],
    end: Callable[[str], object],
) -> str:
    """Stop a process while each part of a cache is being written; the name of the round that did.

    Rounds that are over too early come to their end and are made again.
    """
    for number in itertools.count():
        name = f"round {number}"
        for part in parts:
            part[:] = 0
        begin(name)
        until(lambda: all(part.flat[0] for part in parts))
        process.stop()
        if not any(part.all() for part in parts):
            return name
        process.resume()
        end(name)
    raise AssertionError("there are always more rounds")


@pytest.mark.parametrize("path", ["local", "tcp"])
def test_blocks_come_from_another_process(servers: Servers, children: Children, path: str) -> None:
    port = free_ports()
    prefill = children(SIZE, "prefill", port, groups=(BIG,), path=path)
    prefill.memory[:] = np.random.default_rng(2).integers(1, 256, SIZE, np.uint8)
    decode = servers("decode", groups=(BIG,), path=path)
    decode.load("r", source("r", port), ALL)
    prefill.ask("offer", "r", ALL[::-1])
    decode.wait_received("r")
    expected = prefill.memory.reshape(BIG.shape(1))[:, ::-1]
    assert (decode.caches[0] == expected).all()
    prefill.ask("wait_sent", "r")


@pytest.mark.parametrize("path", ["local", "tcp"])
def test_nothing_is_written_to_blocks_that_were_reported_after_an_abort(
    servers: Servers, children: Children, path: str
) -> None:
    port = free_ports()
    prefill = children(SIZE, "prefill", port, groups=(BIG,), path=path)
    prefill.memory[:] = 1
    # Sooner than a silent peer counts as lost, which fences it as well.
    decode = servers("decode", groups=(BIG,), path=path, fence_timeout=0.05)
    cache = decode.caches[0]

    def begin(name: str) -> None:
        decode.load(name, source(name, port), ALL)
        prefill.ask("offer", name, ALL)
        until(lambda: cache[0, 0, 0, 0, 0])
        prefill.ask("hold_loop")  # native threads go on writing whatever decode says

    def end(name: str) -> None:
        prefill.ask("release_loop")
        decode.wait_for(name)
        prefill.ask("wait_for", name)

    name = stopped_halfway(prefill, [cache], begin, end)
    decode.step(Step(aborts=[(name, "test")]))
    if path == "local":
        # Stopped within a copy that no one can fence, it must go on first.
        prefill.resume()
    decode.wait_for(name)
    cache[:] = 7
    prefill.resume()
    prefill.ask("release_loop", after=0.3)
    prefill.ask("wait_for", name)
    assert (cache == 7).all()


def test_a_request_survives_that_its_prefill_was_fenced_off_for_anothers_sake(
    servers: Servers, children: Children
) -> None:
    port = free_ports()
    prefill = children(SIZE, "prefill", port, groups=(BIG,))
    prefill.memory[:] = 1
    decode = servers("decode", groups=(BIG,))
    cache = decode.caches[0]
    half = BIG.blocks // 2

    def begin(name: str) -> None:
        for request, blocks in ((f"bad {name}", ALL[:half]), (f"good {name}", ALL[half:])):
            decode.load(request, source(request, port), blocks)
            prefill.ask("offer", request, blocks)

    def end(name: str) -> None:
        decode.wait_for(f"bad {name}", f"good {name}")

    name = stopped_halfway(prefill, [cache[:, :half], cache[:, half:]], begin, end)
    decode.step(Step(aborts=[(f"bad {name}", "test")]))
    decode.wait_for(f"bad {name}")
    prefill.resume()
    decode.wait_for(f"good {name}")
    assert not decode.invalid, decode.reasons()
    assert cache[:, half:].all()


def test_prefill_keeps_its_blocks_until_every_rank_of_decode_has_them(servers: Servers) -> None:
    port = free_ports()
    prefill = filled(servers("prefill", port))
    first, second = (servers("decode", rank=rank, ranks=2) for rank in range(2))
    prefill.offer("r", [1])
    first.load("r", source("r", port), [1])
    first.wait_received("r")
    prefill.look()
    assert not prefill.sent
    second.load("r", source("r", port), [1])
    second.wait_received("r")
    prefill.wait_sent("r")


def test_a_killed_prefill_fails_what_it_was_to_send(servers: Servers, children: Children) -> None:
    port = free_ports()
    prefill = children(SIZE, "prefill", port, groups=(BIG,))
    decode = servers("decode", groups=(BIG,))
    prefill.memory[:] = 1
    decode.load("computing", source("computing", port), [1])
    decode.load("writing", source("writing", port), ALL[2:])
    prefill.ask("offer", "writing", ALL[2:])
    until(lambda: decode.caches[0][0, 2, 0, 0, 0])
    prefill.kill()
    decode.wait_received("computing", "writing")
    assert 1 in decode.invalid
    assert "was lost" in str(decode.reasons())


def test_a_killed_decode_does_not_keep_prefills_blocks(
    servers: Servers, children: Children
) -> None:
    port = free_ports()
    prefill = filled(servers("prefill", port, groups=(BIG,)))
    decode = children(SIZE, "decode", groups=(BIG,))

    def begin(name: str) -> None:
        decode.ask("load", name, source(name, port), ALL)
        prefill.offer(name, ALL)

    name = stopped_halfway(decode, [decode.memory], begin, prefill.wait_for)
    prefill.look()
    assert name not in prefill.sent
    decode.kill()
    prefill.wait_for(name)
    [(request, peer, _)] = prefill.reasons()
    assert request == name and peer.startswith("127.0.0.1:")


def test_a_load_from_several_ranks_fails_as_a_whole_when_one_fails(servers: Servers) -> None:
    port = free_ports(2)
    first, second = (filled(servers("prefill", port, rank=rank, ranks=2)) for rank in range(2))
    decode = servers("decode")
    first.offer("r", [1])
    second.step(Step(dropped=[("r", "prefill ended it: FINISHED_ABORTED")]))
    decode.load("r", source("r", port, 2), [1])
    decode.wait_received("r")
    assert decode.invalid == {1}
    first.wait_sent("r")
