"""A session as threads see it."""

from __future__ import annotations

from ..session import AnySession
from ..session import Session as LoopSession
from ..waiting import DEFAULT, Timeout
from .loop_thread import LoopThread

__all__ = ["Session"]


class Session(AnySession):
    """The connection to one peer engine; made by :meth:`Engine.connect`, which caches it.

    Two of these are equal when they are the same session. When the peer is lost the session is
    dead. Calls of the engine that are given a dead session connect to its id again; if another
    engine answers there, they raise :class:`~aioflagcx.errors.PeerRestarted`. All methods can be
    called on any thread.
    """

    __slots__ = ("_loop", "_session")

    def __init__(self, session: LoopSession, loop: LoopThread) -> None:
        super().__init__(session._link, session._runtime)
        self._session = session
        self._loop = loop

    def notify(self, name: str, payload: bytes) -> None:
        """Send a message to the peer's :meth:`Engine.notifications`, within transfer_timeout.

        ``name`` has at most 1 MiB in UTF-8, ``payload`` at most
        ``Config.notification_max_payload``; TypeError and ValueError say otherwise. Returns when
        the peer has queued it. Raises :class:`~aioflagcx.errors.NotifyRefused` when it did not,
        and another :class:`~aioflagcx.errors.TransferError`, with ``notify_delivered`` None,
        when it did not say.
        """
        self._loop.run(lambda: self._session.notify(name, payload))

    def refresh(self, *, timeout: Timeout = DEFAULT) -> None:
        """Bring the table of the peer's regions up to date, within ``timeout`` seconds.

        By default transfer_timeout; None: no limit. Seldom needed: peers push changes, and a
        transfer that misses an address asks by itself.
        Raises :class:`~aioflagcx.errors.TransferTimeout`, :class:`~aioflagcx.errors.PeerLost`.
        """
        self._loop.run(lambda: self._session.refresh(timeout=timeout))

    def close(self) -> None:
        """Cancel the session's transfers, wait until they are quiet, and say goodbye.

        Nothing happens when it is dead. The next call that needs the peer connects again.
        """
        if self.alive:
            self._loop.run(self._session.close)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Session):
            return NotImplemented
        return self._link is other._link

    def __hash__(self) -> int:
        return hash(self._link)
