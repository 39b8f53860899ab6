"""What an engine has between ``initialize`` and its end."""

from __future__ import annotations

import operator
import threading
import time

from ...errors import RegistrationError
from ...sync import Engine, Session
from ..limits import SETTLE
from .managed import ManagedBuffers
from .registrations import Registrations
from .settings import Settings
from .transfers import Transfers

__all__ = ["Opened", "Process"]

_PROBE_TIMEOUT = 5.0
"""Seconds in which a peer answers a probe, or is not reachable."""


class Opened:
    """The engine and what is kept beside it. All methods can be called on any thread."""

    def __init__(self, engine: Engine, settings: Settings) -> None:
        self.engine = engine
        self.settings = settings
        self.memory = Registrations(engine)
        self.buffers = ManagedBuffers(engine)
        self.transfers = Transfers(engine, settings.config)

    def reach(self, peer: str) -> Session:
        """The session with a peer that has answered just now; raises as ``Engine.connect`` does."""
        end = time.monotonic() + _PROBE_TIMEOUT
        session = self.engine.connect(peer, timeout=_PROBE_TIMEOUT)
        session.refresh(timeout=max(end - time.monotonic(), SETTLE))
        return session

    def bytes_at(self, address: int, length: int) -> memoryview:
        """That memory, which has to be ours; RegistrationError if it is not."""
        address = operator.index(address)
        if length < 0:
            raise ValueError(f"length {length}")
        part = self.buffers.find(address, length)
        if part is None:
            part = self.memory.find(address, length)
        if part is None:
            raise RegistrationError(
                f"{length} bytes do not lie in one managed buffer or registered memory",
                address=address,
            )
        return part


class Process:
    """What belongs to one process: a forked child begins anew."""

    def __init__(self) -> None:
        self.changing = threading.Lock()
        """Initializing and closing take turns."""
        self.opened: Opened | None = None
