"""The peer's MR table as the initiator has it: pushed by the peer, or asked for after a miss."""

from __future__ import annotations

import asyncio
import logging

from . import _native
from .errors import ConnectError, ProtocolError, TransferTimeout
from .handshake import ControlConnection
from .handshake.messages import Metadata, MetadataUpdate
from .threads import NativeThreads

__all__ = ["RemoteTable"]

_logger = logging.getLogger(__name__)


class RemoteTable:
    """Keeps the native session's copy up to date."""

    def __init__(
        self, connection: ControlConnection, native: _native.Session, threads: NativeThreads
    ) -> None:
        self._connection = connection
        self._native = native
        self._threads = threads
        self._applying = asyncio.Lock()
        self._asking: asyncio.Task[None] | None = None
        self._next: asyncio.Task[None] | None = None

    async def replace(self, generation: int, table: bytes) -> None:
        """Take a whole table; :class:`~aioflagcx.errors.ProtocolError` when it is broken, another
        :class:`~aioflagcx.errors.ConnectError` when there is no memory for what it asks for."""
        update = MetadataUpdate(full=True, base=0, generation=generation, table=table, removed=b"")
        await self._apply(update)

    async def pushed(self, update: MetadataUpdate) -> None:
        """Take an update that the peer sent by itself; asks for more if it does not fit."""
        if not await self._apply(update):
            self._ask_soon()  # without waiting: a handler must not wait for a reply

    async def refresh(self, timeout: float | None) -> None:
        """Ask the peer for what it has now, at most ``timeout`` seconds.

        Calls share a question that has not been sent yet: the answer to one that has been may
        be older than what the caller knows.

        Raises :class:`~aioflagcx.errors.TransferTimeout`,
        :class:`~aioflagcx.errors.PeerLost` or what :meth:`replace` raises.
        """
        task = self._ask_soon()
        await asyncio.wait((task,), timeout=timeout)
        if not task.done():
            peer = self._connection.peer
            raise TransferTimeout(
                f"{peer} did not send its region table within {timeout} s", peer=peer
            )
        task.result()

    def _ask_soon(self) -> asyncio.Task[None]:
        """The question that has not been sent yet."""
        if self._next is None:
            self._next = asyncio.get_running_loop().create_task(self._ask(self._asking))
            self._next.add_done_callback(_retrieved)
        return self._next

    async def _ask(self, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        self._asking, self._next = self._next, None
        since = self._native.generation
        update = await self._connection.request(Metadata(since=since), None)
        if not await self._apply(update):
            await self._apply(await self._connection.request(Metadata(since=0), None))

    async def _apply(self, update: MetadataUpdate) -> bool:
        """False: it builds on a generation we do not have."""
        async with self._applying:
            if update.generation <= self._native.generation:
                return True  # overtaken by a newer one
            try:
                applied = await self._threads.run(
                    self._native.update_table,
                    update.full,
                    update.base,
                    update.generation,
                    update.table,
                    update.removed,
                )
            except ValueError as error:
                peer = self._connection.peer
                raise ProtocolError(
                    f"{peer} sent a broken region table", peer=peer, cause=error
                ) from error
            except _native.NativeError as error:
                peer = self._connection.peer
                raise ConnectError(
                    f"writes into {peer}'s memory end with a read, and there is no memory of ours "
                    f"for what is read: {error.call}: {error.detail}",
                    peer=peer,
                    cause=error,
                ) from error
        if applied:
            _logger.debug("%s: regions of generation %d", self._connection.peer, update.generation)
        return applied


def _retrieved(task: asyncio.Task[None]) -> None:
    """Its error has been seen, also when all who asked have given up waiting."""
    if not task.cancelled():
        task.exception()
