"""What the native core reports, handed to whom it concerns on the event loop's thread."""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from . import _native
from .flights import Flights

if TYPE_CHECKING:
    from .link import Link
    from .serving import Guest

__all__ = ["Events"]

_logger = logging.getLogger(__name__)


_TURN = 256
"""Transfers finished before the event loop gets its turn: a microsecond or two each."""


class Events:
    """Reads the native core's events whenever it signals that there are some."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, native: _native.TransferEngine, flights: Flights
    ) -> None:
        self._loop = loop
        self._native = native
        self._flights = flights
        self.links: dict[int, Link] = {}
        """Sessions not freed yet, by the id of the native session."""
        self.guests: dict[int, Guest] = {}
        """Responders not freed yet, by the id of the native responder."""
        self._fd = native.event_fd
        loop.add_reader(self._fd, self._readable)

    def close(self) -> None:
        """Nothing is reported any more."""
        if not self._loop.is_closed():
            self._loop.remove_reader(self._fd)

    def _readable(self) -> None:
        landed, others = self._native.poll_events()
        self._flights.landed(landed[:_TURN])
        if len(landed) > _TURN:
            self._loop.call_soon(self._land, landed, _TURN)
        for event in others:
            try:
                self._dispatch(event)
            except Exception:
                _logger.exception("cannot handle %r", event)

    def _land(self, landed: list[int], start: int) -> None:
        self._flights.landed(landed[start : start + _TURN])
        if len(landed) > start + _TURN:
            self._loop.call_soon(self._land, landed, start + _TURN)

    def _dispatch(self, event: _native.Event) -> None:
        if isinstance(event, _native.TransferEvent):
            self._flights.failed(event)
        elif isinstance(event, _native.EndpointDown):
            link = self.links.get(event.session)
            if link is not None:
                link.endpoint_down(event)
        elif isinstance(event, _native.KeepaliveLost):
            owner = self.links.get(event.owner) or self.guests.get(event.owner)
            if owner is not None:
                owner.keepalive_lost(event.reason)
        elif isinstance(event, _native.DeviceNote):
            level = logging.WARNING if event.bad else logging.INFO
            _logger.log(level, "device %s: %s", event.name, event.text)
            if event.back:
                for link in self.links.values():
                    link.rails.device_back(event.device)
        elif isinstance(event, _native.PathNote):
            link = self.links.get(event.session)
            if link is not None:
                link.path_noted(event)
        elif isinstance(event, _native.Immediates):
            guest = self.guests.get(event.responder)
            if guest is not None:
                guest.immediates(event.imm)
