from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
from promises.lab import ARRANGEMENTS, EVERYWHERE, Lab
from promises.nursery import Nursery
from promises.two_hosts import TwoHosts


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that uses `lab` runs in every arrangement, or in those its marker names."""
    if "lab" in metafunc.fixturenames:
        marker = metafunc.definition.get_closest_marker("arrangements")
        names = marker.args if marker else EVERYWHERE
        metafunc.parametrize("arrangement", names, indirect=True)


@pytest.fixture
def arrangement(request: pytest.FixtureRequest) -> object:
    return ARRANGEMENTS[request.param]


@pytest_asyncio.fixture
async def lab(arrangement: object) -> AsyncIterator[Lab]:
    async with contextlib.AsyncExitStack() as stack:
        yield Lab(arrangement, stack)


@pytest.fixture
def two_hosts() -> Iterator[TwoHosts]:
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.fail("network namespaces need root and iproute2")
    with TwoHosts(ip).up() as hosts:
        yield hosts


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    nursery = Nursery()
    yield nursery
    nursery.close()


@pytest.fixture
def unguarded_nursery() -> Iterator[Nursery]:
    nursery = Nursery(guarded=False)
    yield nursery
    nursery.close()


@pytest.fixture
def report(
    record_property: Callable[[str, object], None], request: pytest.FixtureRequest
) -> Callable[..., None]:
    """Keep a figure: in the report of the run, and on the terminal with -s or -rP."""

    def keep(name: str, value: float, unit: str) -> None:
        record_property(name, value)
        print(f"{request.node.name}: {name} {value:.4g} {unit}")

    return keep


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", "arrangements(*names): where a test's peer is, see promises/lab.py"
    )
