"""What the parts of a running engine share."""

from __future__ import annotations

import asyncio
import dataclasses

from . import _native
from .config import Config
from .events import Events
from .flights import Flights
from .handshake import Identity, Limits
from .threads import NativeThreads

__all__ = ["Runtime"]


@dataclasses.dataclass(kw_only=True, eq=False)
class Runtime:
    """From :meth:`Engine.start` to :meth:`Engine.close`."""

    loop: asyncio.AbstractEventLoop
    config: Config
    limits: Limits
    identity: Identity
    """Final once the port is known, before the first connection."""
    native: _native.TransferEngine
    threads: NativeThreads
    connecting: NativeThreads
    """For calls that wait for a peer's device, which may be silent: those of :attr:`threads`, a
    fence above all, must not wait behind them."""
    flights: Flights
    events: Events
