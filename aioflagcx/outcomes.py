"""How transfers end, in the words of :mod:`aioflagcx.errors`."""

from __future__ import annotations

import enum
from typing import Literal

from . import _native
from .errors import (
    AioFlagcxError,
    EngineClosed,
    LocalAddressError,
    RemoteAccessError,
    RemoteAddressError,
    RetryExceeded,
    TransferCancelled,
    TransferError,
    TransferTimeout,
)

__all__ = ["Stop", "failure", "local_address_error", "remote_address_error", "stopped"]


class Stop(enum.Enum):
    """Why a transfer is stopped before its end."""

    TIMEOUT = enum.auto()
    CANCEL = enum.auto()
    CLOSE = enum.auto()


def stopped(
    reason: Stop,
    *,
    peer: str | None,
    timeout: float | None,
    progress: str,
    quiet: bool,
    notify_delivered: bool | None,
    rail: str | None = None,
) -> tuple[Literal["timed_out", "cancelled"], AioFlagcxError]:
    """Status and error of a transfer that was stopped."""
    if reason is Stop.CLOSE:
        return "cancelled", EngineClosed(f"the engine was closed: {progress}", peer=peer)
    kind = TransferTimeout if reason is Stop.TIMEOUT else TransferCancelled
    words = f"not done within {timeout} s" if reason is Stop.TIMEOUT else "cancelled"
    if notify_delivered is None:
        progress += ", the peer had not confirmed the notification"
    error = kind(
        f"{words}: {progress}{_and_peer(quiet)}",
        peer=peer,
        rail=rail,
        remote_quiet=quiet,
        notify_delivered=notify_delivered,
    )
    return ("timed_out" if reason is Stop.TIMEOUT else "cancelled"), error


def failure(event: _native.TransferEvent, peer: str, quiet: bool) -> TransferError:
    """The error of a transfer that the native core gave up."""
    kind: type[TransferError] = TransferError
    words = "a local failure"
    if event.status == _native.STATUS_REMOTE_ACCESS:
        kind = RemoteAccessError
        words = "the peer's device refused the access"
    elif event.status == _native.STATUS_RETRY_EXCEEDED:
        kind = RetryExceeded
        words = "no rail to the peer worked as often as retry_count allows"
    if event.address:
        words += f" at {event.address:#x}+{event.length}"
    cause = event.cause or None
    if cause is not None and event.vendor_err:
        cause += f" (vendor error {event.vendor_err:#x})"
    return kind(
        words + _and_peer(quiet),
        peer=peer,
        rail=event.rail or None,
        address=event.address or None,
        cause=cause,
        remote_quiet=quiet,
    )


def _and_peer(quiet: bool) -> str:
    return "" if quiet else "; the peer did not confirm that its memory will not change any more"


def local_address_error(miss: _native.LocalMiss) -> LocalAddressError:
    """The error of a piece that is in no region of ours."""
    return LocalAddressError(
        f"piece {miss.index}, {miss.address:#x}+{miss.length}, lies in no single region "
        "registered here that allows it",
        index=miss.index,
        address=miss.address,
        length=miss.length,
    )


def remote_address_error(miss: _native.RemoteMiss, peer: str) -> RemoteAddressError:
    """The error of a piece that is in no region of the peer's."""
    return RemoteAddressError(
        f"piece {miss.index}, {miss.address:#x}+{miss.length}, lies in no single region of "
        f"{peer} that grants the access",
        index=miss.index,
        address=miss.address,
        length=miss.length,
        peer=peer,
    )
