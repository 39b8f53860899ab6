"""The C side of FlagCX's engine (flagcx_p2p.h), as functions.

What C writes through pointers is returned, and -1 is a RuntimeError with the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from .descriptors import Descriptor, check_range
from .engine import P2pConn, P2pEngine, checked, engines
from .failures import raises_runtime_errors

__all__ = [
    "FlagcxP2pNotifyMsg",
    "flagcxP2pEngineGetMetadata",
    "flagcxP2pEngineGetNotifs",
    "flagcxP2pEngineMakeDesc",
    "flagcxP2pEnginePrepareDesc",
    "flagcxP2pEngineReadVector",
    "flagcxP2pEngineSendNotif",
    "flagcxP2pEngineUpdateDesc",
    "flagcxP2pEngineWriteVector",
    "flagcxP2pEngineWriteVectorSync",
    "flagcxP2pEngineXferStatus",
]

_GPU = 0
"""The index that an engine's metadata tells; the engine is bound to no GPU."""


@dataclasses.dataclass(frozen=True, slots=True)
class FlagcxP2pNotifyMsg:
    """A message between applications."""

    name: str
    """The sender's, or what it is about."""

    msg: bytes
    """Its content."""


# Descriptors --------------------------------------------------------------------------------------


@raises_runtime_errors
def flagcxP2pEnginePrepareDesc(engine: P2pEngine, mr: int, data: int, size: int) -> bytes:
    """The descriptor, for peers, of ``size`` bytes from ``data`` in our MR ``mr``."""
    addr, size = check_range(data, size)
    checked(P2pEngine, engine)
    region = engine.region(mr)
    if not (region.addr <= addr and addr + size <= region.addr + region.size):
        raise ValueError(f"{addr:#x}+{size} does not lie in {region!r}")
    return Descriptor(addr, size, engine.rkey(region, addr)).pack()


@raises_runtime_errors
def flagcxP2pEngineUpdateDesc(desc: bytes, remote_addr: int, size: int) -> bytes:
    """``desc`` for another part of the same memory."""
    return Descriptor(*check_range(remote_addr, size), Descriptor.unpack(desc).rkey).pack()


@raises_runtime_errors
def flagcxP2pEngineMakeDesc(conn: P2pConn, remote_va: int, size: int) -> bytes:
    """The descriptor of memory that the peer has registered."""
    addr, size = check_range(remote_va, size)
    checked(P2pConn, conn)
    return Descriptor(addr, size, conn.rkey(addr, size)).pack()


# Transfers ----------------------------------------------------------------------------------------


@raises_runtime_errors
def flagcxP2pEngineWriteVector(
    conn: P2pConn,
    mr_ids: Sequence[int],
    src_vec: Sequence[int],
    size_vec: Sequence[int],
    descs: Sequence[bytes],
    num_iovs: int | None = None,
) -> int:
    """Begin to write the first ``num_iovs`` pieces, by default all; the transfer's id."""
    local, remote, sizes = _pieces(conn, mr_ids, src_vec, size_vec, descs, num_iovs)
    return conn.engine.submit(conn, False, local, remote, sizes)


@raises_runtime_errors
def flagcxP2pEngineReadVector(
    conn: P2pConn,
    mr_ids: Sequence[int],
    dst_vec: Sequence[int],
    size_vec: Sequence[int],
    descs: Sequence[bytes],
    num_iovs: int | None = None,
) -> int:
    """Begin to read the first ``num_iovs`` pieces, by default all; the transfer's id."""
    local, remote, sizes = _pieces(conn, mr_ids, dst_vec, size_vec, descs, num_iovs)
    return conn.engine.submit(conn, True, local, remote, sizes)


@raises_runtime_errors
def flagcxP2pEngineWriteVectorSync(
    conn: P2pConn,
    mr_ids: Sequence[int],
    src_vec: Sequence[int],
    size_vec: Sequence[int],
    descs: Sequence[bytes],
) -> None:
    """Write all pieces; returns when they are in the peer's memory."""
    pieces = _pieces(conn, mr_ids, src_vec, size_vec, descs, None)
    conn.engine.write(conn, *pieces)


@raises_runtime_errors
def flagcxP2pEngineXferStatus(conn: P2pConn, transfer_id: int) -> bool:
    """Whether the transfer is done; once it is, its id is free.

    Raises RuntimeError when it has failed, where C says no more than that it has ended.
    """
    done: bool = checked(P2pConn, conn).engine.submitted.done(transfer_id)
    return done


def _pieces(
    conn: P2pConn,
    mr_ids: Sequence[int],
    addresses: Sequence[int],
    sizes: Sequence[int],
    descs: Sequence[bytes],
    count: int | None,
) -> tuple[list[int], list[int], list[int]]:
    checked(P2pConn, conn)
    lengths = {len(mr_ids), len(addresses), len(sizes), len(descs)}
    if count is not None:
        if not 0 <= count <= min(lengths):
            raise ValueError(f"num_iovs {count} of {min(lengths)}")
    elif len(lengths) != 1:
        raise ValueError(
            f"{len(mr_ids)} MRs, {len(addresses)} addresses, {len(sizes)} sizes and "
            f"{len(descs)} descriptors"
        )
    number = min(lengths) if count is None else count
    for mr in set(mr_ids[:number]):
        conn.engine.region(mr)
    targets = [Descriptor.unpack(desc) for desc in descs[:number]]
    for index, (size, target) in enumerate(zip(sizes, targets, strict=False)):
        if size > target.size:
            raise ValueError(f"sizes[{index}] = {size}, but its descriptor has {target.size} bytes")
    return list(addresses[:number]), [target.addr for target in targets], list(sizes[:number])


# Messages -----------------------------------------------------------------------------------------


@raises_runtime_errors
def flagcxP2pEngineSendNotif(conn: P2pConn, notify_msg: FlagcxP2pNotifyMsg) -> int:
    """Send a message to the peer; its bytes. Returns when the peer has it."""
    checked(P2pConn, conn)
    checked(FlagcxP2pNotifyMsg, notify_msg)
    conn.engine.sync.write(conn.session, (), (), (), notify=(notify_msg.name, notify_msg.msg))
    return len(notify_msg.name.encode()) + len(notify_msg.msg)


@raises_runtime_errors
def flagcxP2pEngineGetNotifs() -> list[FlagcxP2pNotifyMsg]:
    """What has come since the last call, for any engine of this process."""
    return [
        FlagcxP2pNotifyMsg(one.name, one.payload)
        for engine in engines()
        for one in engine.sync.notifications().get_all()
    ]


@raises_runtime_errors
def flagcxP2pEngineGetMetadata(engine: P2pEngine) -> str:
    """What a peer needs to connect: "ip:port?gpu?notif", the last being messages' port."""
    checked(P2pEngine, engine)
    engine.sync._started()
    return f"{engine.sync.session_id}?{_GPU}?{engine.sync.rpc_port}"
