"""FlagCX's point-to-point calls on this engine, within a process and between two."""

from __future__ import annotations

import gc
import itertools
import os
import struct
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest
from conformance.sync.threads_pair import together
from integrations.processes import MiB, Target, free_port, until

from aioflagcx import Config
from aioflagcx.integrations import flagcx
from aioflagcx.integrations.flagcx import (
    FLAGCXLibrary,
    FlagcxP2pNotifyMsg,
    P2pConn,
    P2pEngine,
)
from aioflagcx.integrations.flagcx import engine as module
from aioflagcx.integrations.flagcx.devices import devices
from aioflagcx.sync import Transfer

Targets = Callable[..., Target]

SIZE = 4 * MiB + 4321


@pytest.fixture
def library() -> FLAGCXLibrary:
    return FLAGCXLibrary()


class Side(NamedTuple):
    engine: P2pEngine
    memory: np.ndarray
    address: int
    mr: int
    session: str


@pytest.fixture
def sides(library: FLAGCXLibrary) -> Iterator[Callable[[], Side]]:
    """Makes engines with registered memory, which are destroyed at the end."""
    made: list[P2pEngine] = []

    def make() -> Side:
        engine = library.flagcxP2pEngineCreate()
        made.append(engine)
        memory = np.random.default_rng(len(made)).integers(0, 256, SIZE, np.uint8)
        mr = library.flagcxP2pRegister(engine, memory.ctypes.data, SIZE)
        library.flagcxP2pStartRpcServer(engine)
        session = f"127.0.0.1:{library.flagcxP2pGetRpcPort(engine)}"
        return Side(engine, memory, memory.ctypes.data, mr, session)

    yield make
    for engine in made:
        library.flagcxP2pEngineDestroy(engine)


class Pair(NamedTuple):
    ours: Side
    theirs: Side
    conn: P2pConn


@pytest.fixture
def pair(library: FLAGCXLibrary, sides: Callable[[], Side]) -> Pair:
    ours, theirs = sides(), sides()
    return Pair(ours, theirs, library.flagcxP2pGetConn(ours.engine, theirs.session))


def test_a_batch_is_in_the_memory_of_another_process(
    path: str, library: FLAGCXLibrary, sides: Callable[[], Side], targets: Targets
) -> None:
    target, ours = targets(SIZE), sides()
    conn = library.flagcxP2pGetConn(ours.engine, target.session)
    cuts = [0, 1, 5000, MiB, SIZE]
    sizes = [end - start for start, end in itertools.pairwise(cuts)]
    library.flagcxP2pBatchWriteSync(
        conn,
        src_vas=[ours.address + start for start in cuts[:-1]],
        dst_vas=[target.address + start for start in cuts[:-1]],
        sizes=sizes,
    )
    assert np.array_equal(target.memory, ours.memory)


def test_connections_are_cached_and_connected_anew_when_they_are_lost(
    library: FLAGCXLibrary, sides: Callable[[], Side], targets: Targets
) -> None:
    ours, port = sides(), free_port()
    first = targets(4096, port, MC_LEGACY_RPC_PORT_BINDING="1")
    conn = library.flagcxP2pGetConn(ours.engine, first.session)
    assert library.flagcxP2pGetConn(ours.engine, first.session) is conn
    assert together(8, lambda _: library.flagcxP2pGetConn(ours.engine, first.session)) == [conn] * 8
    first.kill()
    until(lambda: not conn.session.alive)
    piece = [ours.address], [first.address], [1]
    with pytest.raises(RuntimeError, match=first.session):
        library.flagcxP2pBatchWriteSync(conn, *piece)
    with pytest.raises(RuntimeError, match=f"flagcxP2pGetConn: .*{first.session}"):
        library.flagcxP2pGetConn(ours.engine, first.session)
    second = targets(4096, port, MC_LEGACY_RPC_PORT_BINDING="1")
    with pytest.raises(RuntimeError, match="is not the one"):
        library.flagcxP2pBatchWriteSync(conn, *piece)
    with pytest.raises(RuntimeError, match="is not the one"):
        flagcx.flagcxP2pEngineMakeDesc(conn, second.address, 1)
    assert not second.memory.any(), "an old connection's addresses mean nothing to another process"
    again = library.flagcxP2pGetConn(ours.engine, second.session)
    library.flagcxP2pBatchWriteSync(again, [ours.address], [second.address], [4096])
    assert np.array_equal(second.memory, ours.memory[:4096])


def test_threads_write_by_one_connection(library: FLAGCXLibrary, pair: Pair) -> None:
    ours, theirs, conn = pair
    part = SIZE // 8

    def work(index: int) -> None:
        for start in range(index * part, (index + 1) * part, part // 16):
            size = min(part // 16, (index + 1) * part - start)
            library.flagcxP2pBatchWriteSync(
                conn, [ours.address + start], [theirs.address + start], [size]
            )

    together(8, work)
    assert np.array_equal(theirs.memory[: 8 * part], ours.memory[: 8 * part])


def test_the_same_memory_has_the_same_number_and_other_memory_another(
    library: FLAGCXLibrary, sides: Callable[[], Side]
) -> None:
    side = sides()
    assert library.flagcxP2pRegister(side.engine, side.address, SIZE) == side.mr
    inner = library.flagcxP2pRegisterHost(side.engine, side.address + 1, 100)
    assert inner != side.mr
    assert library.flagcxP2pRegisterHost(side.engine, side.address + 1, 100) == inner


def test_failures_are_runtime_errors_that_name_the_call_and_the_reason(
    library: FLAGCXLibrary, pair: Pair
) -> None:
    ours, theirs, conn = pair
    before = theirs.memory.copy()
    here, there = ours.address, theirs.address
    failing: list[tuple[Any, str]] = [
        (lambda: library.flagcxP2pBatchWriteSync(conn, [here], [there + SIZE], [1]), "no single"),
        (lambda: library.flagcxP2pBatchWriteSync(conn, [here, 1], [there, there], [1, 1]), "0x1"),
        (lambda: library.flagcxP2pBatchWriteSync(conn, [here], [there, there], [1]), "2 dest"),
        (lambda: library.flagcxP2pBatchWriteSync(conn, [here], [there], [-1]), "-1"),
        (lambda: library.flagcxP2pBatchWriteSync(conn, [here], [there], ["x"]), "integer"),
        (lambda: library.flagcxP2pBatchWriteSync(None, [here], [there], [1]), "P2pConn"),
        (lambda: library.flagcxP2pBatchWriteSync(conn, None, None, None), "NoneType"),
        (lambda: library.flagcxP2pGetConn(ours.engine, "127.0.0.1"), "127.0.0.1"),
        (lambda: library.flagcxP2pGetConn(ours.engine, None), "None"),
        (lambda: library.flagcxP2pGetConn(conn, theirs.session), "P2pEngine"),
        (lambda: library.flagcxP2pRegister(ours.engine, 4096, 4096), "not mapped"),
        (lambda: library.flagcxP2pRegister(ours.engine, None, 1), "NoneType"),
        (lambda: library.flagcxP2pRegister(None, here, 1), "P2pEngine"),
        (lambda: library.flagcxP2pGetRpcPort(None), "P2pEngine"),
    ]  # fmt: skip
    for call, words in failing:
        with pytest.raises(RuntimeError, match=words) as caught:
            call()
        assert str(caught.value).startswith("flagcxP2p")
    with pytest.raises(ValueError, match="sizes"):  # as the original does
        library.flagcxP2pBatchWriteSync(conn, [here], [], [])
    assert np.array_equal(theirs.memory, before)
    library.flagcxP2pBatchWriteSync(conn, [], [], [])


@pytest.mark.parametrize(
    ("chosen", "expected"),
    [
        ("", "auto"),
        ("mlx5", "mlx5*"),
        ("mlx5_bond_1, mlx5_bond_2", "mlx5_bond_1*,mlx5_bond_2*"),
        ("=mlx5_0,mlx5_1", "mlx5_0,mlx5_1"),
        ("mlx5_0:1,mlx5_1:2", "mlx5_0,mlx5_1:2"),
        ("^mlx5_1", "mlx5_[0],rxe[0]"),
        ("^=mlx5_1", "mlx5_[0],mlx5_1[0],rxe[0]"),
    ],
)
def test_devices_are_those_that_flagcx_is_told_to_take(chosen: str, expected: str) -> None:
    def named(**environ: str) -> str:
        there = ["mlx5_0", "mlx5_1", "mlx5_10", "rxe0"]
        return devices(Config.from_env(environ), environ, lambda: there)

    assert named(FLAGCX_IB_HCA=chosen) == expected
    assert named(FLAGCX_IB_HCA=chosen, AIOFLAGCX_DEVICES="soft:2") == "soft:2"


class Hostile:
    """Raises what nobody expects, whatever is done with it."""

    def __len__(self) -> int:
        raise OSError("hostile")

    __index__ = __iter__ = __getitem__ = __len__


def test_every_failure_of_every_call_is_a_runtime_error(library: FLAGCXLibrary, pair: Pair) -> None:
    """Each argument in turn being garbage, the others right."""
    ours, theirs, conn = pair
    desc = flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address, 9)
    vectors = [conn, [ours.mr], [ours.address], [9], [desc]]
    calls: dict[Callable[..., Any], list[Any]] = {
        library.flagcxP2pEngineDestroy: [conn],
        library.flagcxP2pGetRpcPort: [conn],
        library.flagcxP2pStartRpcServer: [conn],
        library.flagcxP2pRegister: [ours.engine, ours.address, 9],
        library.flagcxP2pRegisterHost: [ours.engine, ours.address, 9],
        library.flagcxP2pGetConn: [ours.engine, theirs.session],
        library.flagcxP2pBatchWriteSync: [conn, [ours.address], [theirs.address], [9]],
        flagcx.flagcxP2pEnginePrepareDesc: [ours.engine, ours.mr, ours.address, 9],
        flagcx.flagcxP2pEngineUpdateDesc: [desc, theirs.address, 9],
        flagcx.flagcxP2pEngineMakeDesc: [conn, theirs.address, 9],
        flagcx.flagcxP2pEngineWriteVector: vectors,
        flagcx.flagcxP2pEngineReadVector: vectors,
        flagcx.flagcxP2pEngineWriteVectorSync: vectors,
        flagcx.flagcxP2pEngineXferStatus: [conn, 9],
        flagcx.flagcxP2pEngineSendNotif: [conn, "message"],
        flagcx.flagcxP2pEngineGetMetadata: [conn],
    }
    for call, right in calls.items():
        for position, garbage in itertools.product(
            range(len(right)), [None, "text", -1, 2**200, 1.5, [None], [-1], Hostile(), [Hostile()]]
        ):
            arguments = [*right[:position], garbage, *right[position + 1 :]]
            with pytest.raises(RuntimeError) as caught:
                call(*arguments)
            assert str(caught.value).startswith(f"{call.__name__}: "), garbage
        with pytest.raises(RuntimeError, match=call.__name__):
            call(*right, None, None, None)
    library.flagcxP2pBatchWriteSync(conn, [ours.address], [theirs.address], [SIZE])


def test_an_engine_that_could_not_be_made_is_such_a_failure(
    library: FLAGCXLibrary, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> str:
        raise OSError("no more files")

    monkeypatch.setattr(module, "_everywhere", fail)
    with pytest.raises(RuntimeError, match=r"flagcxP2pEngineCreate: .*no more files"):
        library.flagcxP2pEngineCreate()


def test_a_forked_child_is_told_that_the_engine_is_its_parents(
    library: FLAGCXLibrary, pair: Pair
) -> None:
    ours, theirs, conn = pair
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        said = b"nothing"
        try:
            library.flagcxP2pBatchWriteSync(conn, [ours.address], [theirs.address], [9])
        except RuntimeError as error:
            said = str(error).encode()
        finally:
            os.write(writing, said)
            os._exit(0)
    os.waitpid(child, 0)
    said = os.read(reading, 1000).decode()
    for end in reading, writing:
        os.close(end)
    assert said.startswith("flagcxP2pBatchWriteSync: ")
    assert "fork" in said
    library.flagcxP2pBatchWriteSync(conn, [ours.address], [theirs.address], [9])


@pytest.mark.parametrize(
    ("v4", "v6", "host"),
    [
        ("127.0.0.1", "2001:db8::7", "[::1]"),
        ("10.0.0.7", "2001:db8::7", "127.0.0.1"),
        ("10.0.0.7", "::1", "127.0.0.1"),
        ("127.0.0.1", "::1", "127.0.0.1"),
    ],
)
def test_an_engine_listens_by_the_ip_that_the_host_has(
    monkeypatch: pytest.MonkeyPatch,
    library: FLAGCXLibrary,
    sides: Callable[[], Side],
    v4: str,
    v6: str,
    host: str,
) -> None:
    monkeypatch.setattr(module, "primary_address", {4: v4, 6: v6}.__getitem__)
    ours, theirs = sides(), sides()
    session = f"{host}:{library.flagcxP2pGetRpcPort(theirs.engine)}"
    conn = library.flagcxP2pGetConn(ours.engine, session)
    library.flagcxP2pBatchWriteSync(conn, [ours.address], [theirs.address], [SIZE])
    assert np.array_equal(theirs.memory, ours.memory)


def test_a_destroyed_engine_refuses_and_reaches_nothing(library: FLAGCXLibrary, pair: Pair) -> None:
    ours, theirs, conn = pair
    piece = [ours.address], [theirs.address], [SIZE]
    library.flagcxP2pBatchWriteSync(conn, *piece)
    library.flagcxP2pEngineDestroy(theirs.engine)
    theirs.memory[:] = 0x77
    with pytest.raises(RuntimeError, match=theirs.session):
        library.flagcxP2pBatchWriteSync(conn, *piece)
    assert (theirs.memory == 0x77).all()
    library.flagcxP2pEngineDestroy(theirs.engine)
    for call in (library.flagcxP2pGetRpcPort, library.flagcxP2pStartRpcServer):
        with pytest.raises(RuntimeError, match="closed"):
            call(theirs.engine)


# The C side ---------------------------------------------------------------------------------------


def fields(desc: bytes) -> tuple[int, int, int]:
    assert len(desc) == 64
    assert not any(desc[16:])
    return struct.unpack_from("<QII", desc)


def test_descriptors_of_both_sides_are_the_same(pair: Pair) -> None:
    _, theirs, conn = pair
    made = flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address + 5, 100)
    prepared = flagcx.flagcxP2pEnginePrepareDesc(theirs.engine, theirs.mr, theirs.address + 5, 100)
    assert made == prepared
    addr, size, rkey = fields(made)
    assert (addr, size) == (theirs.address + 5, 100)
    updated = flagcx.flagcxP2pEngineUpdateDesc(made, theirs.address + 9, 7)
    assert fields(updated) == (theirs.address + 9, 7, rkey)


def test_descriptors_have_keys_of_their_regions(library: FLAGCXLibrary, pair: Pair) -> None:
    """Also of one that was registered after the connection was made."""
    _, theirs, conn = pair
    memory = np.zeros(4096, np.uint8)
    mr = library.flagcxP2pRegister(theirs.engine, memory.ctypes.data, 4096)
    made = flagcx.flagcxP2pEngineMakeDesc(conn, memory.ctypes.data, 4096)
    assert made == flagcx.flagcxP2pEnginePrepareDesc(theirs.engine, mr, memory.ctypes.data, 4096)
    first = flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address, 1)
    assert fields(made)[2] != fields(first)[2]


def test_what_does_not_fit_a_descriptor_is_refused(pair: Pair) -> None:
    ours, theirs, conn = pair
    desc = flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address, 1)
    for size in (2**32, -1):
        for call in (
            lambda size=size: flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address, size),
            lambda size=size: flagcx.flagcxP2pEngineUpdateDesc(desc, theirs.address, size),
            lambda size=size: flagcx.flagcxP2pEnginePrepareDesc(
                ours.engine, ours.mr, ours.address, size
            ),
        ):
            with pytest.raises(RuntimeError, match=rf"size {size}"):
                call()
    for addr in (-1, 2**64):
        with pytest.raises(RuntimeError, match="address"):
            flagcx.flagcxP2pEngineUpdateDesc(desc, addr, 1)
    with pytest.raises(RuntimeError, match="has no region"):
        flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address + SIZE, 1)
    with pytest.raises(RuntimeError, match="does not lie in"):
        flagcx.flagcxP2pEnginePrepareDesc(ours.engine, ours.mr, ours.address + 1, SIZE)
    with pytest.raises(RuntimeError, match="MR 99"):
        flagcx.flagcxP2pEnginePrepareDesc(ours.engine, 99, ours.address, 1)
    with pytest.raises(RuntimeError, match="64 bytes"):
        flagcx.flagcxP2pEngineUpdateDesc(desc[:-1], theirs.address, 1)


def vectors(pair: Pair, cuts: list[int]) -> tuple[list[int], list[int], list[int], list[bytes]]:
    """The C calls' arguments for pieces between these offsets, with their order reversed there."""
    ours, theirs, conn = pair
    sizes = [end - start for start, end in itertools.pairwise(cuts)]
    return (
        [ours.mr] * len(sizes),
        [ours.address + start for start in cuts[:-1]],
        sizes,
        [
            flagcx.flagcxP2pEngineMakeDesc(conn, theirs.address + SIZE - end, end - start)
            for start, end in itertools.pairwise(cuts)
        ],
    )


def test_vectors_are_written_and_read_by_descriptors(pair: Pair) -> None:
    ours, theirs, conn = pair
    cuts = [0, 1, 4097, MiB, SIZE]
    arguments = vectors(pair, cuts)
    expected = np.empty(SIZE, np.uint8)
    for start, end in itertools.pairwise(cuts):
        expected[SIZE - end : SIZE - start] = ours.memory[start:end]

    flagcx.flagcxP2pEngineWriteVectorSync(conn, *arguments)
    assert np.array_equal(theirs.memory, expected)

    theirs.memory[:] = 0
    transfer = flagcx.flagcxP2pEngineWriteVector(conn, *arguments, 4)
    until(lambda: flagcx.flagcxP2pEngineXferStatus(conn, transfer))
    assert np.array_equal(theirs.memory, expected)

    original = ours.memory.copy()
    ours.memory[:] = 0
    transfer = flagcx.flagcxP2pEngineReadVector(conn, *arguments)
    until(lambda: flagcx.flagcxP2pEngineXferStatus(conn, transfer))
    assert np.array_equal(ours.memory, original)

    ours.memory[:] = 0
    transfer = flagcx.flagcxP2pEngineReadVector(conn, *arguments, num_iovs=3)
    until(lambda: flagcx.flagcxP2pEngineXferStatus(conn, transfer))
    assert np.array_equal(ours.memory[:MiB], original[:MiB])
    assert not ours.memory[MiB:].any()


def test_the_address_decides_and_not_the_key(pair: Pair) -> None:
    ours, theirs, conn = pair
    desc = struct.pack("<QII48x", theirs.address, 4096, 0xDEADBEEF)
    flagcx.flagcxP2pEngineWriteVectorSync(conn, [ours.mr], [ours.address], [4096], [desc])
    assert np.array_equal(theirs.memory[:4096], ours.memory[:4096])


def test_vectors_that_cannot_be_move_nothing(pair: Pair) -> None:
    ours, theirs, conn = pair
    before = theirs.memory.copy()
    mrs, sources, sizes, descs = vectors(pair, [0, 4096, 8192])
    bad: list[tuple[Any, ...]] = [
        ([99, ours.mr], sources, sizes, descs),
        (mrs[:1], sources, sizes, descs),
        (mrs, sources, [4096, 4097], descs),
        (mrs, sources, sizes, [descs[0], b"short"]),
        (mrs, [1, 1], sizes, descs),
        (None, sources, sizes, descs),
    ]
    for arguments in bad:
        with pytest.raises(RuntimeError):
            flagcx.flagcxP2pEngineWriteVectorSync(conn, *arguments)
        with pytest.raises(RuntimeError):
            flagcx.flagcxP2pEngineWriteVector(conn, *arguments)
    with pytest.raises(RuntimeError, match="num_iovs 3"):
        flagcx.flagcxP2pEngineWriteVector(conn, mrs, sources, sizes, descs, 3)
    assert np.array_equal(theirs.memory, before)


def test_a_transfer_that_fails_is_told_once(pair: Pair) -> None:
    ours, theirs, conn = pair
    desc = struct.pack("<QII48x", theirs.address + SIZE, 4096, 0)
    arguments = [ours.mr], [ours.address], [4096], [desc]
    transfer = flagcx.flagcxP2pEngineWriteVector(conn, *arguments)
    with pytest.raises(RuntimeError, match="no single region"):
        until(lambda: flagcx.flagcxP2pEngineXferStatus(conn, transfer))
    for number in (transfer, 0, 99):
        with pytest.raises(RuntimeError, match=f"transfer {number}"):
            flagcx.flagcxP2pEngineXferStatus(conn, number)


def test_transfers_that_nobody_asks_for_keep_their_outcome_and_nothing_else(
    submitted: list[weakref.ref[Transfer]], pair: Pair
) -> None:
    arguments = vectors(pair, [0, SIZE])
    first = flagcx.flagcxP2pEngineWriteVector(pair.conn, *arguments)
    until(lambda: all((transfer := held()) is None or transfer.done() for held in submitted))
    last = flagcx.flagcxP2pEngineReadVector(pair.conn, *arguments)
    gc.collect()
    assert submitted[0]() is None
    assert flagcx.flagcxP2pEngineXferStatus(pair.conn, first)
    until(lambda: flagcx.flagcxP2pEngineXferStatus(pair.conn, last))


def test_messages_reach_the_peers_process(pair: Pair) -> None:
    _, _, conn = pair
    assert flagcx.flagcxP2pEngineGetNotifs() == []
    messages = [FlagcxP2pNotifyMsg(f"agent-{n}", os.urandom(n)) for n in range(20)]
    for message in messages:
        sent = flagcx.flagcxP2pEngineSendNotif(conn, message)
        assert sent == len(message.name) + len(message.msg)
    got: list[FlagcxP2pNotifyMsg] = []
    until(lambda: got.extend(flagcx.flagcxP2pEngineGetNotifs()) or len(got) == 20)
    assert got == messages
    with pytest.raises(RuntimeError, match="FlagcxP2pNotifyMsg"):
        flagcx.flagcxP2pEngineSendNotif(conn, "text")  # type: ignore[arg-type]


def test_metadata_is_what_a_peer_connects_by(library: FLAGCXLibrary, pair: Pair) -> None:
    ours, theirs, _ = pair
    address, gpu, notif = flagcx.flagcxP2pEngineGetMetadata(theirs.engine).split("?")
    assert gpu == "0"
    assert int(notif) > 0
    conn = library.flagcxP2pGetConn(ours.engine, address)
    library.flagcxP2pBatchWriteSync(conn, [ours.address], [theirs.address], [SIZE])
    assert np.array_equal(theirs.memory, ours.memory)
