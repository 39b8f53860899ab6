"""Every failure the library reports, as one typed tree.

Catch :class:`AioFlagcxError` for everything, :class:`ConnectError` for "no session came
about", :class:`TransferError` for "this transfer did not succeed". The errors that mean a
limit of time was passed are also :class:`TimeoutError`.
"""

from __future__ import annotations

__all__ = [
    "AioFlagcxError",
    "AuthenticationError",
    "ConfigError",
    "ConnectError",
    "ConnectRefused",
    "ConnectTimeout",
    "DeregisterTimeout",
    "EngineClosed",
    "HandoverError",
    "HandoverTimeout",
    "HandshakeRejected",
    "HostUnreachable",
    "LocalAddressError",
    "NotifyRefused",
    "PeerLost",
    "PeerRestarted",
    "ProtocolError",
    "QuiesceTimeout",
    "RegistrationError",
    "RemoteAccessError",
    "RemoteAddressError",
    "RetryExceeded",
    "TransferCancelled",
    "TransferError",
    "TransferTimeout",
]


class AioFlagcxError(Exception):
    """Base of every error of this library.

    ``str()`` gives the message and whichever of peer, rail, address and cause the message
    does not already name. Instances can be pickled.
    """

    message: str
    """What happened and what to do about it, without the attributes below."""

    peer: str | None
    """The peer's session id ("host:port"), or its engine id, or None."""

    rail: str | None
    """The (local device, remote device) pair, such as "mlx5_0->mlx5_1", or None."""

    address: int | None
    """The memory address the error is about, or None."""

    cause: BaseException | str | None
    """The underlying failure: an exception, or the words of the call that failed."""

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        rail: str | None = None,
        address: int | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        # `args` holds the message alone and every keyword has a default, so that the
        # inherited pickling (class, args, __dict__) rebuilds any class of the tree.
        super().__init__(message)
        self.message = message
        self.peer = peer
        self.rail = rail
        self.address = address
        self.cause = cause
        if isinstance(cause, BaseException):
            self.__cause__ = cause
        self._text = _describe(message, peer, rail, address, cause)

    def __str__(self) -> str:
        return self._text


def _describe(
    message: str,
    peer: str | None,
    rail: str | None,
    address: int | None,
    cause: BaseException | str | None,
) -> str:
    """The message, followed by the attributes it does not already mention."""
    cause_text = None
    if isinstance(cause, BaseException):
        words = str(cause)
        cause_text = f"{type(cause).__name__}: {words}" if words else type(cause).__name__
        if words and words in message:
            cause_text = None
    elif cause is not None and cause not in message:
        cause_text = cause
    details = []
    if peer is not None and peer not in message:
        details.append(f"peer={peer}")
    if rail is not None and rail not in message:
        details.append(f"rail={rail}")
    if address is not None and f"{address:#x}" not in message:
        details.append(f"address={address:#x}")
    if cause_text is not None:
        details.append(f"cause={cause_text}")
    return f"{message} ({', '.join(details)})" if details else message


class ConfigError(AioFlagcxError):
    """A configuration value or ``AIOFLAGCX_*`` variable is unknown, unparsable or out of range.

    Remedy: correct the variable or field the message names; it says what is accepted.
    """


class RegistrationError(AioFlagcxError):
    """Memory cannot be registered, or a name or range is already registered differently.

    Remedy: the message says what about the memory is wrong (empty, not contiguous, read-only,
    unmapped, wrong device, locked-memory limit); pass memory without that property.
    """


class DeregisterTimeout(AioFlagcxError, TimeoutError):
    """A region was still in use, here or by a stopped peer, when ``deregister`` ran out of time.

    Remedy: do not free or reuse the memory yet. The region stays revoked and deregistration
    finishes in the background; wait for or cancel the transfers that use it, or call
    ``deregister`` again.
    """


class QuiesceTimeout(AioFlagcxError, TimeoutError):
    """A peer on this host was stopped inside a copy into our memory when ``quiesce`` gave up.

    Remedy: do not reuse the memory that it was writing to. It can begin no other copy; continue
    or end its process, then call ``quiesce`` again.
    """


class EngineClosed(AioFlagcxError):
    """The engine is closed, not started yet, or was closed while the call was waiting.

    Remedy: use the engine inside its ``async with`` block, or start a new one.
    """


class _PieceAddressError(AioFlagcxError):
    """What both address errors carry."""

    index: int | None
    """Position of the offending piece in the call's sequences."""

    length: int | None
    """Length of the offending piece in bytes."""

    def __init__(
        self,
        message: str = "",
        *,
        index: int | None = None,
        address: int | None = None,
        length: int | None = None,
        peer: str | None = None,
        rail: str | None = None,
        cause: BaseException | str | None = None,
    ) -> None:
        super().__init__(message, peer=peer, rail=rail, address=address, cause=cause)
        self.index = index
        self.length = length


class LocalAddressError(_PieceAddressError):
    """A piece does not lie wholly inside one region registered here that grants the access.

    Raised before any byte moves. Remedy: register the memory first, or split the piece at the
    edge between two regions.
    """


class RemoteAddressError(_PieceAddressError):
    """A piece does not lie wholly inside one region of the peer that grants the access.

    Raised before any byte moves, after the peer's table was refreshed once. Remedy: have the
    peer register the memory with the access you need, or correct the address.
    """


class ConnectError(AioFlagcxError):
    """No session with the peer came about.

    Raised as itself when the connection breaks during the handshake or the peer reports an
    internal failure; the subclasses name the usual reasons. Remedy: look at the peer's log.
    """


class ConnectRefused(ConnectError):
    """The peer's host answered, but nothing accepts connections on that port.

    Remedy: start the peer's engine, or correct the port of the session id.
    """


class HostUnreachable(ConnectError):
    """The peer's host name does not resolve, or there is no route to its address.

    Remedy: correct the host part of the session id, or the network and firewall between.
    """


class HandshakeRejected(ConnectError):
    """The peer understood the request and declined it.

    Remedy: the message gives the peer's reason, such as no rail in common or engine closing.
    """


class ProtocolError(ConnectError):
    """The other side does not speak this protocol, or not a version that we speak.

    Remedy: check that the port is an aioflagcx handshake port and that both sides run
    compatible releases with the same ``handshake_max_frame``.
    """


class AuthenticationError(ConnectError):
    """The two engines do not share the same ``auth_secret``, or only one of them has one.

    Remedy: set ``AIOFLAGCX_AUTH_SECRET`` to the same value on both sides.
    """


class ConnectTimeout(ConnectError, TimeoutError):
    """The session was not ready within the time allowed.

    Remedy: the message says how far it came. A silent host points at a firewall, an accepted
    connection without an answer at a stopped or overloaded peer; else raise the timeout.
    """


class TransferError(AioFlagcxError):
    """A transfer, notification or fence did not succeed.

    Raised as itself when the provider reports a failure none of the subclasses names. Our own
    memory may be reused at once; whether the peer's may be is what ``remote_quiet`` says.
    """

    remote_quiet: bool
    """True: no byte of this transfer can reach the peer's memory any more. False: the peer did
    not confirm that, so what was the target may still change."""

    notify_delivered: bool | None
    """True: the notification was delivered. False: it was not and will not be. None: unknown,
    the session was lost after the data had landed."""

    def __init__(
        self,
        message: str = "",
        *,
        peer: str | None = None,
        rail: str | None = None,
        address: int | None = None,
        cause: BaseException | str | None = None,
        remote_quiet: bool = False,
        notify_delivered: bool | None = False,
    ) -> None:
        super().__init__(message, peer=peer, rail=rail, address=address, cause=cause)
        self.remote_quiet = remote_quiet
        self.notify_delivered = notify_delivered


class TransferTimeout(TransferError, TimeoutError):
    """The transfer, or a control request it needed, was not done within its timeout.

    Remedy: raise ``timeout``, or find out from ``stats()`` why the peer or rail is slow.
    """


class TransferCancelled(TransferError):
    """The transfer was cancelled by ``Transfer.cancel()`` or by another awaiter's cancellation.

    Remedy: none is needed; wrap an awaiter in ``asyncio.shield`` to protect the transfer.
    """


class RemoteAccessError(TransferError):
    """The peer's device refused the access: key revoked, out of bounds, or not permitted.

    Remedy: the peer most likely deregistered the region meanwhile; refresh the session and
    agree with the peer on how long regions live.
    """


class RetryExceeded(TransferError):
    """The transfer's slices failed on every rail, or as often as ``retry_count`` allows.

    Remedy: the cause names the completion status; check the link and the peer's device.
    """


class PeerLost(TransferError):
    """The peer died, closed the session, or was silent for ``keepalive_timeout``.

    Remedy: repeat the call, it connects afresh, or choose another peer.
    """


class PeerRestarted(TransferError):
    """Another engine answers at the peer's address than the one this transfer was meant for.

    Remedy: learn the new engine's regions before sending again; old addresses are void.
    """


class NotifyRefused(TransferError):
    """The peer did not take a notification: its queue is full or the payload is too large.

    Data of the same write may have landed. Remedy: retry the notification later, have the
    peer consume ``notifications()`` faster, or send less in one.
    """


class HandoverError(AioFlagcxError):
    """A request's KV cache was not handed over, as the message says: aborted, lost, failed.

    Raised on both sides. When a receiver raises it, nothing can change its blocks any more. Remedy:
    give the request up, or start it again in the same or another room.
    """


class HandoverTimeout(HandoverError, TimeoutError):
    """The other side of a hand-over did not appear, or prefill did not finish, in time.

    Remedy: look at the other side's log; raise ``bootstrap_timeout`` or ``waiting_timeout``.
    """
