"""The rails of one session: connected together, then each kept up by itself.

A rail joins a device of ours with one of the peer's. When its queue pairs fail, the peer fences
them and they are connected anew, as another attempt; the other rails, and the transfers on them,
do not notice. A rail that does not come back is tried again in the background for as long as
another one is up; when none is, the session is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from . import _native
from .connecting import Connecting
from .errors import (
    AioFlagcxError,
    ConnectError,
    ConnectTimeout,
    HandshakeRejected,
    PeerLost,
)
from .fencing import Fences
from .handshake import ControlConnection
from .handshake.fields import printable
from .handshake.messages import ConnectReply
from .remote_table import RemoteTable
from .runtime import Runtime

__all__ = ["Lost", "Rails"]

_logger = logging.getLogger(__name__)

_GRACE = 0.5
"""Seconds that a connect waits for further rails once it has one: a dead device's silence must
not hold up the session until the whole timeout has passed."""

_PAUSE = 0.05
"""Seconds between two recoveries of one rail, so that a path that breaks as soon as it is used
does not become a busy loop between two engines. Doubled each time the rail cannot be connected."""

_LONGEST_PAUSE = 5.0
"""Seconds that a rail which cannot be connected rests at most between two tries: a device that is
back is soon used again, and one that stays away costs next to nothing."""

_STABLE = 10.0
"""Seconds that a rail has to be up to be trusted again: as often as its path fails before that, it
rests longer, as each failure holds up the transfers that have slices on it."""

Lost = Callable[[str, BaseException | None, str], None]
"""Called with the words, the cause and the farewell to the peer when no rail is left."""


class _Rail:
    """What is known of one rail; on the event loop only."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.up = False
        self.attempt = 0
        """The latest that was made for it."""
        self.failed = 0
        """The latest attempt of which the queue pairs failed after they had been connected."""
        self.symptom = ""
        """How they failed."""
        self.tries = 0
        """Failures to connect it since it was up, or since it is needed again."""
        self.up_since = 0.0
        """In the loop's time."""
        self.relapses = 0
        """How often in a row its path failed as soon as it was used."""
        self.error: ConnectError | None = None
        """The latest of them."""
        self.told = False
        """Whether the log says that it is lost."""
        self.rest_until = 0.0
        """In the loop's time: not to be connected again before."""
        self.needed = asyncio.Event()
        """Set when no rail is up any more, and when a device is back."""
        self.first: asyncio.Task[None] | None = None
        """Connects it for the first time."""
        self.keeper: asyncio.Task[None] | None = None
        """Has it fenced and connected again."""


class Rails:
    """Made with the session; :meth:`open` comes first, :meth:`stop` last."""

    def __init__(
        self,
        runtime: Runtime,
        connection: ControlConnection,
        native: _native.Session,
        table: RemoteTable,
        lost: Lost,
    ) -> None:
        self.fences = Fences(connection, native)
        """Which epochs the peer has fenced."""
        self.path = ""
        """How data moves by the rail that came up last."""
        self.copies = False
        """Whether it moves by copies that this process makes."""
        self._runtime = runtime
        self._connection = connection
        self._native = native
        self._connecting = Connecting(runtime, connection, native, table)
        self._lost = lost
        self._rails: list[_Rail] = []
        self._last_attempt = 0
        self._opened = False
        self._stopped = False

    @property
    def down(self) -> int:
        """How many of them are down."""
        return sum(not rail.up for rail in self._rails)

    # The first time --------------------------------------------------------------------------

    async def open(self, deadline: float) -> ConnectReply:
        """Connect all rails before ``deadline``, in the loop's time; one of them is enough.

        Those that could not be connected are tried again in the background. Raises a
        :class:`~aioflagcx.errors.ConnectError` with the reason of each rail when there is none.
        """
        await self._connecting.meet(deadline)
        self._rails = [_Rail(index) for index in range(self._native.rails)]
        self._tell_left_out()
        reply = await self._open(deadline)
        if reply is None or not self._any_up():
            raise self._no_rail()
        self._opened = True
        for rail in self._rails:
            if rail.first is None:
                self._first_try_over(rail)
        return reply

    def _tell_left_out(self) -> None:
        used = {self._native.local_device(rail.index) for rail in self._rails}
        for index, name in enumerate(self._runtime.native.devices):
            if index not in used:
                _logger.info(
                    "%s: %s takes no part: the peer has devices in other subnets only",
                    self._connection.peer,
                    name,
                )

    async def _open(self, deadline: float) -> ConnectReply | None:
        attempt = self._next_attempt(self._rails)
        indices = [rail.index for rail in self._rails]
        reply, answers = await self._connecting.ask(attempt, indices, deadline)
        tasks = []
        for rail in self._rails:
            answer = answers[rail.index]
            if isinstance(answer, ConnectError):
                self._note_failure(rail, answer)
                continue
            rail.first = self._runtime.loop.create_task(
                self._try_first(rail, attempt, answer, deadline)
            )
            tasks.append(rail.first)
        pending = set(tasks)
        while pending and not self._any_up():
            _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        if pending:
            await asyncio.wait(pending, timeout=_GRACE)
        return reply

    async def _try_first(
        self, rail: _Rail, attempt: int, theirs: list[_native.Attributes], deadline: float
    ) -> None:
        try:
            await self._establish(rail, attempt, theirs, deadline)
        finally:
            rail.first = None
        self._first_try_over(rail)

    def _first_try_over(self, rail: _Rail) -> None:
        """From now on it is kept up by itself, if the session has come about."""
        if self._opened and not rail.up:
            if rail.failed != rail.attempt:
                self._note_loss(rail)
            self._keep_soon(rail)

    def _no_rail(self) -> ConnectError:
        errors = [rail.error for rail in self._rails if rail.error is not None]
        if len(errors) == 1 == len(self._rails):
            return errors[0]
        kinds = {type(error) for error in errors}
        kind = kinds.pop() if len(kinds) == 1 else ConnectError
        reasons = "; ".join(self._reason(rail) for rail in self._rails)
        return kind(f"no rail could be connected: {reasons}", peer=self._connection.peer)

    def _reason(self, rail: _Rail) -> str:
        if rail.error is not None:
            return rail.error.message
        return f"{self._name(rail)} failed as soon as it was up: {rail.symptom}"

    # Each by itself --------------------------------------------------------------------------

    def endpoint_down(self, event: _native.EndpointDown) -> None:
        """The queue pairs of an epoch have failed; they are flushed."""
        rail = self._rails[event.epoch.rail]
        if event.epoch.attempt <= rail.failed:
            return
        rail.failed = event.epoch.attempt
        rail.symptom = event.cause or "a transfer was aborted"
        if event.vendor_err:
            rail.symptom += f" (vendor error {event.vendor_err:#x})"
        _logger.info(
            "%s: attempt %d of rail %s failed: %s",
            self._connection.peer,
            event.epoch.attempt,
            self._name(rail),
            rail.symptom,
        )
        if event.epoch.attempt == rail.attempt:
            rail.up = False
        now = self._runtime.loop.time()
        rail.relapses = rail.relapses + 1 if event.path and now - rail.up_since < _STABLE else 0
        if rail.relapses > 1:
            rail.rest_until = now + _pause(rail.relapses - 1)
        if not self._any_up():
            for other in self._rails:
                other.tries = 0
                other.error = None
                other.needed.set()
        if not rail.up and rail.first is None:
            self._keep_soon(rail)

    def device_back(self, device: int) -> None:
        """A device of ours works again: its rails need not rest any longer."""
        for rail in self._rails:
            if self._native.local_device(rail.index) == device:
                rail.rest_until = 0.0
                rail.needed.set()

    def _keep_soon(self, rail: _Rail) -> None:
        if rail.keeper is None and not self._stopped:
            rail.keeper = self._runtime.loop.create_task(self._keep(rail))

    async def _keep(self, rail: _Rail) -> None:
        """Have it fenced and connected again, however often that takes."""
        try:
            while not rail.up:
                # Until the peer answers, slices stay where they are; if it is dead, the
                # keepalive tells.
                epoch = _native.Epoch(rail.failed, rail.index)
                if rail.failed and not await self.fences.confirm([epoch], None):
                    raise PeerLost(f"{self._connection.peer} did not fence {self._name(rail)}")
                await self._rest(rail)
                await self._connect(rail)
                if self._connection.is_closed:
                    return  # its end says why
        except asyncio.CancelledError:
            self._lost("the event loop is being shut down", None, "shut down")
            raise
        except AioFlagcxError as error:
            failed = [f"{self._name(r)}: {r.symptom}" for r in self._rails if r.symptom]
            self._lost(
                f"its data path failed ({'; '.join(failed)}) and could not be set up again",
                error.with_traceback(None),  # which holds this session
                "the data path could not be set up again",
            )
        finally:
            rail.keeper = None

    async def _rest(self, rail: _Rail) -> None:
        loop = self._runtime.loop
        await asyncio.sleep(min(rail.rest_until - loop.time(), _PAUSE))
        rail.needed.clear()
        if rail.rest_until > loop.time() and self._any_up():
            timer = loop.call_at(rail.rest_until, rail.needed.set)
            try:
                await rail.needed.wait()
            finally:
                timer.cancel()

    async def _connect(self, rail: _Rail) -> None:
        loop, config = self._runtime.loop, self._runtime.config
        await self._wait_for_device(rail, loop.time() + config.connect_timeout)
        deadline = loop.time() + config.connect_timeout
        attempt = self._next_attempt([rail])
        try:
            _, answers = await self._connecting.ask(attempt, [rail.index], deadline)
        except ConnectError as error:
            self._note_failure(rail, error)
        else:
            answer = answers[rail.index]
            if isinstance(answer, ConnectError):
                self._note_failure(rail, answer)
            else:
                await self._establish(rail, attempt, answer, deadline)
        if rail.up or self._connection.is_closed or rail.failed == attempt:
            return
        self._note_loss(rail)
        if all(self._is_hopeless(other) for other in self._rails):
            raise self._no_rail()

    async def _wait_for_device(self, rail: _Rail, deadline: float) -> None:
        """A port that flaps, or a link that is trained anew, is back within seconds: as long as
        no other rail is up, that is better than to lose the session."""
        native, loop = self._runtime.native, self._runtime.loop
        device = self._native.local_device(rail.index)
        while native.device_down(device) and not self._any_up() and loop.time() < deadline:
            rail.needed.clear()
            timer = loop.call_at(deadline, rail.needed.set)
            try:
                await rail.needed.wait()
            finally:
                timer.cancel()

    async def _establish(
        self, rail: _Rail, attempt: int, theirs: list[_native.Attributes], deadline: float
    ) -> None:
        try:
            path = await self._connecting.establish(attempt, rail.index, theirs, deadline)
        except ConnectError as error:
            self._note_failure(rail, error)
            return
        rail.up_since = self._runtime.loop.time()
        rail.rest_until = rail.up_since + _PAUSE
        rail.tries = 0
        rail.error = None
        if rail.failed == attempt:  # that has been heard of before
            return
        rail.up = True
        self.path = path
        self.copies = path in ("process", "local")
        if rail.told:
            rail.told = False
            _logger.info("%s: rail %s is back", self._connection.peer, self._name(rail))

    def _note_failure(self, rail: _Rail, error: ConnectError) -> None:
        rail.tries += 1
        rail.error = error
        rail.rest_until = self._runtime.loop.time() + _pause(rail.tries)

    def _note_loss(self, rail: _Rail) -> None:
        words = "%s: rail %s is lost and tried again in the background: %s"
        level = logging.DEBUG if rail.told else logging.WARNING
        error = "" if rail.error is None else rail.error.message
        reason = "; ".join(filter(None, (rail.symptom, error)))
        _logger.log(level, words, self._connection.peer, self._name(rail), reason)
        rail.told = True

    def _is_hopeless(self, rail: _Rail) -> bool:
        """Whether it is down and trying it again would only put off the end."""
        if rail.up or rail.error is None:
            return False
        if isinstance(rail.error, ConnectTimeout | HandshakeRejected):
            return True
        if self._runtime.native.device_down(self._native.local_device(rail.index)):
            return True  # it has been waited for
        return rail.tries > self._runtime.config.retry_count

    def _any_up(self) -> bool:
        return any(rail.up for rail in self._rails)

    def _next_attempt(self, rails: list[_Rail]) -> int:
        self._last_attempt += 1
        for rail in rails:
            rail.attempt = self._last_attempt
        return self._last_attempt

    def _name(self, rail: _Rail) -> str:
        return printable(self._native.rail_name(rail.index))

    # The end ---------------------------------------------------------------------------------

    def stop(self) -> None:
        """Leave the rails as they are."""
        self._stopped = True
        for rail in self._rails:
            if rail.keeper is not None:
                rail.keeper.cancel()

    async def stopped(self) -> None:
        """Until no blocking call of theirs is under way."""
        tasks = [task for rail in self._rails for task in (rail.first, rail.keeper) if task]
        if tasks:
            await asyncio.wait(tasks)


def _pause(failures: int) -> float:
    """How long a rail rests after so many failures in a row."""
    return min(_PAUSE * 2.0 ** min(failures - 1, 32), _LONGEST_PAUSE)
