"""A transfer's way to the native core: at once where that can be, else by the long way, which is to
connect, or to ask the peer where its memory is."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from . import _native
from .blocks import BlockIds, BlockLayout, block_request
from .errors import AioFlagcxError, NotifyRefused, PeerLost, TransferError
from .outcomes import local_address_error, remote_address_error
from .peers import Peers
from .pieces import Addresses, Pieces
from .session import AnySession
from .transfer import Transfer

__all__ = ["launch", "make_block_request", "make_request"]

_logger = logging.getLogger(__name__)

_TRIES = 2
"""Connects for one transfer: a session may turn out to be dead just when it is used."""


def make_request(
    native: _native.TransferEngine,
    pieces: Pieces,
    op: int,
    local: Addresses,
    remote: Addresses,
    lens: Addresses,
) -> _native.Request:
    """The pieces of a transfer, copied, checked and found in our memory; on any thread.

    ``pieces`` is the calling thread's own. Raises TypeError, ValueError and
    :class:`~aioflagcx.errors.LocalAddressError`.
    """
    arrays = pieces.arrays(local, remote, lens)
    try:
        return _native.Request(native, op, *arrays)
    except _native.LocalMiss as miss:
        raise local_address_error(miss) from None


def make_block_request(
    native: _native.TransferEngine,
    layout: BlockLayout | Sequence[BlockLayout],
    src_blocks: BlockIds,
    dst_blocks: BlockIds,
) -> _native.Request:
    """The blocks of a transfer, as :func:`make_request` does it for pieces."""
    try:
        return block_request(native, layout, src_blocks, dst_blocks)
    except _native.LocalMiss as miss:
        raise local_address_error(miss) from None


def launch(
    peers: Peers,
    transfer: Transfer,
    request: _native.Request,
    session: AnySession | None,
    target: AnySession | str,
    *,
    reconnect: bool = True,
) -> None:
    """Post a new transfer on ``session``, or see to it that it is posted on one with ``target``.

    ``reconnect``: whether that may be another connection than ``target``, a session, has had.
    """
    if session is not None:
        try:
            transfer._post(session._link)
        except (_native.RemoteMiss, _native.NativeError, NotifyRefused):
            pass  # the long way finds out what to do about it
        else:
            return
    loop = transfer._flights.loop
    if not request.pieces and transfer._notify is None:
        loop.call_soon(transfer._complete_empty)
    else:
        helper = loop.create_task(_post(peers, transfer, target, reconnect))
        transfer._reach(helper, target if isinstance(target, str) else target.id)


async def _post(
    peers: Peers, transfer: Transfer, target: AnySession | str, reconnect: bool
) -> None:
    """Post ``transfer``, or end it with the reason why that cannot be.

    The transfer's deadline is not looked at here: it cancels this when the time is over.
    """
    try:
        await _reach_and_post(peers, transfer, target, reconnect)
    except asyncio.CancelledError:
        transfer._abandoned()
        raise
    except AioFlagcxError as error:
        transfer._give_up(error)
    except Exception as error:
        _logger.exception("%r could not be posted", transfer)
        words = f"internal error: {type(error).__name__}: {error}"
        transfer._give_up(TransferError(words, cause=error, remote_quiet=True))


async def _reach_and_post(
    peers: Peers, transfer: Transfer, target: AnySession | str, reconnect: bool
) -> None:
    for _ in range(_TRIES if reconnect else 1):
        if reconnect:
            link = (await peers.reach(target, peers.connect_timeout))._link
        else:
            assert isinstance(target, AnySession)
            link = target._link
            if not link.alive:
                raise link.loss(True)
        try:
            try:
                transfer._post(link)
            except _native.RemoteMiss:
                await link.table.refresh(None)
                transfer._post(link)
        except _native.RemoteMiss as miss:
            raise remote_address_error(miss, link.id) from None
        except _native.NativeError as error:
            link.submit_failed(error)
            failure = error
        else:
            return
    raise PeerLost(
        f"{link.id} was lost as soon as it was connected to",
        peer=link.id,
        cause=failure,
        remote_quiet=True,
    )
