"""The long way of a transfer to the native core: connect, or ask the peer where its memory is."""

from __future__ import annotations

import asyncio
import logging

from . import _native
from .errors import AioFlagcxError, PeerLost, TransferError
from .outcomes import remote_address_error
from .peers import Peers
from .session import Session
from .transfer import Transfer

__all__ = ["post"]

_logger = logging.getLogger(__name__)

_TRIES = 2
"""Connects for one transfer: a session may turn out to be dead just when it is used."""


async def post(peers: Peers, transfer: Transfer, target: Session | str) -> None:
    """Post ``transfer``, or end it with the reason why that cannot be.

    The transfer's deadline is not looked at here: it cancels this when the time is over.
    """
    try:
        await _post(peers, transfer, target)
    except asyncio.CancelledError:
        transfer._abandoned()
        raise
    except AioFlagcxError as error:
        transfer._give_up(error)
    except Exception as error:
        _logger.exception("%r could not be posted", transfer)
        words = f"internal error: {type(error).__name__}: {error}"
        transfer._give_up(TransferError(words, cause=error, remote_quiet=True))


async def _post(peers: Peers, transfer: Transfer, target: Session | str) -> None:
    for _ in range(_TRIES):
        session = await peers.reach(target, peers.connect_timeout)
        link = session._link
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
