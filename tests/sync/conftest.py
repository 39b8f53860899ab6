"""Blocking engines to try the API on, on every path of the soft device."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from sync.threads_pair import MiB, Pair

from aioflagcx import Config
from aioflagcx.sync import Engine


@pytest.fixture(params=["process", "local", "tcp"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def engines(path: str) -> Iterator[Callable[..., Engine]]:
    """Starts engines, with settings as given, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def start(**settings: Any) -> Engine:
            config = Config(**{"soft_paths": (path,), **settings})
            return stack.enter_context(Engine(config=config))

        yield start


@pytest.fixture
def pairs(engines: Callable[..., Engine]) -> Callable[..., Pair]:
    """Makes pairs of engines, with settings for both."""

    def make(size: int = MiB, **settings: Any) -> Pair:
        ours, theirs = engines(**settings), engines(**settings)
        src = np.arange(size, dtype=np.uint32).view(np.uint8)[:size].copy()
        dst = np.zeros(size, np.uint8)
        local = ours.register(src, name="src")
        theirs.register(dst, name="dst")
        session = ours.connect(theirs.session_id)
        return Pair(ours, theirs, src, dst, local, session.regions["dst"], session)

    return make


@pytest.fixture
def pair(pairs: Callable[..., Pair]) -> Pair:
    """A pair with default settings."""
    return pairs()
