"""Blocking engines on the devices of a test. A conftest takes what it needs."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from conformance.devices import Devices
from conformance.sync.threads_pair import MiB, Pair

from aioflagcx.sync import Engine

__all__ = ["Engines", "Pairs", "engines", "pair", "pairs"]


class Engines:
    """Starts engines, with settings as given, which are closed at the end of the test."""

    def __init__(self, devices: Devices, stack: contextlib.ExitStack) -> None:
        self._devices = devices
        self._stack = stack

    def near(self, **settings: Any) -> Engine:
        return self._stack.enter_context(self._devices.near.sync_engine(**settings))

    def far(self, **settings: Any) -> Engine:
        return self._stack.enter_context(self._devices.far.sync_engine(**settings))


Pairs = Callable[..., Pair]


@pytest.fixture
def engines(devices: Devices) -> Iterator[Engines]:
    with contextlib.ExitStack() as stack:
        yield Engines(devices, stack)


@pytest.fixture
def pairs(engines: Engines) -> Pairs:
    """Makes pairs of engines, with settings for both."""

    def make(size: int = MiB, **settings: Any) -> Pair:
        ours, theirs = engines.near(**settings), engines.far(**settings)
        src = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
        dst = np.zeros(size, np.uint8)
        local = ours.register(src, name="src")
        theirs.register(dst, name="dst")
        session = ours.connect(theirs.session_id)
        return Pair(ours, theirs, src, dst, local, session.regions["dst"], session)

    return make


@pytest.fixture
def pair(pairs: Pairs) -> Pair:
    """A pair with default settings."""
    return pairs()
