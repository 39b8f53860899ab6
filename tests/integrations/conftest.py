"""Engines by the names that other projects give them, and peers in other processes."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator

import pytest
from integrations.processes import Target, running

from aioflagcx.integrations.mooncake import TransferEngine
from aioflagcx.integrations.submitted import Submitted
from aioflagcx.sync import Transfer


@pytest.fixture(params=["local", "tcp"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How data moves between processes of this host; for this one and those it starts."""
    monkeypatch.setenv("AIOFLAGCX_SOFT_PATHS", f"process,{request.param}")
    return str(request.param)


@pytest.fixture
def submitted(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Transfer]]:
    """All transfers that are submitted, which this does not hold."""
    transfers: list[weakref.ref[Transfer]] = []

    def recorded(keeper: Submitted, transfer: Transfer) -> int:
        transfers.append(weakref.ref(transfer))
        return add(keeper, transfer)

    add = Submitted.add
    monkeypatch.setattr(Submitted, "add", recorded)
    return transfers


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> float:
    """Seconds within which calls are over."""
    monkeypatch.setenv("AIOFLAGCX_TRANSFER_TIMEOUT", "3")
    monkeypatch.setenv("AIOFLAGCX_DRAIN_TIMEOUT", "0.5")
    monkeypatch.setenv("AIOFLAGCX_KEEPALIVE_TIMEOUT", "60")
    return 3.0


@pytest.fixture
def engines() -> Iterator[Callable[[], TransferEngine]]:
    """Makes engines, which are closed at the end."""
    with contextlib.ExitStack() as stack:

        def make(*, initialized: bool = True) -> TransferEngine:
            engine = TransferEngine()
            stack.callback(engine.close)
            if initialized:
                code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
                assert code == 0, engine.last_error()
            return engine

        yield make


@pytest.fixture
def engine(engines: Callable[[], TransferEngine]) -> TransferEngine:
    return engines()


@pytest.fixture
def targets() -> Iterator[Callable[..., Target]]:
    """Starts peers, as `processes.running` does."""
    with contextlib.ExitStack() as stack:
        yield lambda *args, **kwargs: stack.enter_context(running(*args, **kwargs))
