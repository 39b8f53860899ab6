"""The initiator's end: TCP connect, hello, authentication, and errors that say what to do."""

from __future__ import annotations

import asyncio
import errno

from ..errors import (
    AioFlagcxError,
    ConnectError,
    ConnectRefused,
    ConnectTimeout,
    HostUnreachable,
)
from .addresses import format_address
from .authentication import Identity, Initiator
from .connection import ControlConnection
from .handler import CloseReason, Handler
from .limits import Limits
from .resolving import resolve

__all__ = ["open_connection"]

_REFUSED = {errno.ECONNREFUSED, errno.ECONNRESET, errno.ECONNABORTED}
_UNREACHABLE = {
    errno.EACCES,  # an administrative prohibition by a firewall
    errno.EADDRNOTAVAIL,
    errno.EAFNOSUPPORT,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINVAL,  # an address, such as link-local without a zone, that cannot be routed
    errno.ENETDOWN,
    errno.ENETUNREACH,
    errno.EPERM,
}


async def open_connection(
    host: str,
    port: int,
    *,
    identity: Identity,
    secret: str | None,
    limits: Limits,
    timeout: float,
    handler: Handler,
) -> ControlConnection:
    """An authenticated connection to the engine at ``host`` and ``port``.

    ``timeout`` in seconds covers everything. Raises a
    :class:`~aioflagcx.errors.ConnectError`: ConnectRefused, HostUnreachable (also when the
    name does not resolve), ConnectTimeout, AuthenticationError, ProtocolError or
    HandshakeRejected.
    """
    attempt = _Attempt(host, port, identity, secret, limits, handler)
    task = asyncio.create_task(attempt.run())
    try:
        await asyncio.wait({task}, timeout=timeout)
        if task.done():
            return task.result()
        raise ConnectTimeout(
            f"no session with {attempt.peer} within {timeout:g} s: {attempt.stage}",
            peer=attempt.peer,
        )
    except BaseException:
        # Failed, timed out or cancelled: nothing of the attempt is left behind.
        task.add_done_callback(attempt.give_up)
        task.cancel()
        await asyncio.wait({task})
        await attempt.wait_closed()
        raise


class _Attempt:
    """One try to connect, which knows how far it came."""

    def __init__(
        self,
        host: str,
        port: int,
        identity: Identity,
        secret: str | None,
        limits: Limits,
        handler: Handler,
    ) -> None:
        self.peer = format_address(host, port)
        self.stage = "the host name was not resolved, check DNS"
        self._host = host
        self._port = port
        self._identity = identity
        self._secret = secret
        self._limits = limits
        self._handler = handler
        self._connection: ControlConnection | None = None

    async def run(self) -> ControlConnection:
        connection = await self._connect()
        self.stage = (
            "the port accepts connections but nobody answers our hello, the engine is stopped "
            "or overloaded, or it is no aioflagcx port"
        )
        await connection.established
        return connection

    def give_up(self, task: asyncio.Task[ControlConnection]) -> None:
        """End the connection, unless it is just telling the peer why it ends by itself."""
        if not task.cancelled():
            task.exception()  # retrieved: it may have failed while its caller was cancelled
        if self._connection is not None and not self._connection.is_closed:
            self._connection.abort(CloseReason("local", "the attempt to connect was given up"))

    async def wait_closed(self) -> None:
        """Wait for the end of the connection, if there was one."""
        if self._connection is not None:
            await asyncio.wait({self._connection.closed}, timeout=self._limits.close_grace)

    async def _connect(self) -> ControlConnection:
        """TCP connect to the first of the host's addresses that accepts."""
        loop = asyncio.get_running_loop()
        try:
            addresses = await resolve(self._host, self._port)
        except (OSError, UnicodeError) as error:
            raise HostUnreachable(
                f"cannot resolve the host of {self.peer}: correct the session id or DNS",
                peer=self.peer,
                cause=error,
            ) from error
        self.stage = "the host does not answer, check that it is up and the firewall between"
        failure: AioFlagcxError | None = None
        for family, address in addresses:
            try:
                _, connection = await loop.create_connection(
                    self._new_connection, address, self._port, family=family
                )
            except OSError as error:
                # An address that refuses tells more than one without a route.
                if not isinstance(failure, ConnectRefused):
                    failure = self._mapped(error)
            else:
                self._connection = connection
                return connection
        raise failure or HostUnreachable(f"{self.peer} has no address", peer=self.peer)

    def _new_connection(self) -> ControlConnection:
        initiator = Initiator(self._identity, self._secret)
        return ControlConnection(initiator, self._handler, self._limits, peer=self.peer)

    def _mapped(self, error: OSError) -> ConnectError:
        if error.errno in _REFUSED:
            return ConnectRefused(
                f"nothing accepts connections at {self.peer}: start the engine there or correct "
                "the port",
                peer=self.peer,
                cause=error,
            )
        if error.errno in _UNREACHABLE:
            return HostUnreachable(
                f"no route to {self.peer}: check the address, the network and the firewall",
                peer=self.peer,
                cause=error,
            )
        if error.errno == errno.ETIMEDOUT:
            return ConnectTimeout(
                f"no session with {self.peer}: {self.stage}", peer=self.peer, cause=error
            )
        return ConnectError(f"cannot connect to {self.peer}", peer=self.peer, cause=error)
