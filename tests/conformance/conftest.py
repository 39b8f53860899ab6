from __future__ import annotations

from collections.abc import Iterator

import pytest
from conformance.devices import Devices, devices_named
from conformance.fixtures import engine, engines, pair, pairs, pytest_asyncio_loop_factories
from softroce.devices import no_leaks

from aioflagcx.config import SOFT_PATHS

__all__ = ["engine", "engines", "pair", "pairs", "pytest_asyncio_loop_factories"]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Every test here runs on the soft device's paths, or on the RDMA devices that are given."""
    if "devices" in metafunc.fixturenames:
        rdma = metafunc.config.getoption("rdma")
        metafunc.parametrize("devices", [rdma] if rdma else SOFT_PATHS, indirect=True)


@pytest.fixture
def devices(request: pytest.FixtureRequest) -> Devices:
    return devices_named(request.param, emulated=request.config.getoption("emulated"))


@pytest.fixture(autouse=True, scope="module")
def _nothing_is_left_behind(request: pytest.FixtureRequest) -> Iterator[None]:
    """In the guest, whose devices nobody else uses."""
    if request.config.getoption("rdma") and request.config.getoption("emulated"):
        with no_leaks():
            yield
    else:
        yield
