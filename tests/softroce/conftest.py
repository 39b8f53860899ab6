from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from softroce.devices import Device, no_leaks


def pytest_configure(config: pytest.Config) -> None:
    if not Path("/sys/class/infiniband/rxe0").exists():
        raise pytest.UsageError("tests/softroce runs in its guest only: make test-softroce")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """The guest is made for these tests, so none of them has a reason to be skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and reporter.stats.get("skipped") and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True)
def _no_leaks() -> Iterator[None]:
    with no_leaks():
        yield


@pytest.fixture
def near() -> Device:
    """One end of the cable."""
    return Device(0)


@pytest.fixture
def far() -> Device:
    """Its other end."""
    return Device(1)
