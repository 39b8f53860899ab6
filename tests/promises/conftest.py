from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable

import pytest
import pytest_asyncio
from promises.lab import ARRANGEMENTS, EVERYWHERE, Lab


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
