"""One attempt to connect a native session's queue pairs with the peer's."""

from __future__ import annotations

import errno

from . import _native
from .errors import (
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    HostUnreachable,
    PeerLost,
    ProtocolError,
)
from .handshake import ControlConnection
from .handshake.messages import Connect, ConnectReply
from .remote_table import RemoteTable
from .runtime import Runtime

__all__ = ["connect_attempt"]

_KINDS: dict[int, type[ConnectError]] = {
    errno.ETIMEDOUT: ConnectTimeout,
    errno.ECONNREFUSED: ConnectRefused,
    errno.EHOSTUNREACH: HostUnreachable,
    errno.ENETUNREACH: HostUnreachable,
    errno.EPROTO: ProtocolError,
}


async def connect_attempt(
    runtime: Runtime,
    connection: ControlConnection,
    native: _native.Session,
    table: RemoteTable,
    attempt: int,
    deadline: float,
) -> tuple[ConnectReply, str] | None:
    """Connect the queue pairs of ``attempt``; the peer's reply and the path they take.

    None when no rail is down: an earlier attempt has brought all of them up again.

    ``deadline`` is in the loop's time. Raises a :class:`~aioflagcx.errors.ConnectError`.
    """
    peer = connection.peer
    threads, loop, config = runtime.threads, runtime.loop, runtime.config
    try:
        rails = await threads.run(native.prepare, attempt)
        if not rails:
            return None
        request = Connect(
            attempt=attempt,
            rails=tuple(rails),
            keepalive_interval=config.keepalive_interval,
            keepalive_timeout=config.keepalive_timeout,
        )
        reply = await connection.request(request, max(deadline - loop.time(), 0.0))
        if reply.attempt != attempt:
            raise ProtocolError(
                f"{peer} answered attempt {attempt} with attempt {reply.attempt}", peer=peer
            )
        await table.replace(reply.generation, reply.table)
        left = deadline - loop.time()
        if left <= 0:
            raise ConnectTimeout(f"{peer} answered too late to connect to it", peer=peer)
        theirs = [dict(rail) for rail in reply.rails]
        path = await threads.run(native.establish, attempt, theirs, left)
    except _native.NativeError as error:
        if connection.is_closed:  # then the native session is gone, too, and knows no reason
            raise ConnectError(
                f"{peer} closed the connection during the handshake", peer=peer, cause=error
            ) from error
        kind = _KINDS.get(error.errno, ConnectError)
        raise kind(
            f"the data path to {peer} could not be set up: {error.call}: {error.detail}",
            peer=peer,
            cause=error,
        ) from error
    except PeerLost as error:
        raise ConnectError(
            f"{peer} closed the connection during the handshake", peer=peer, cause=error
        ) from error
    return reply, path
