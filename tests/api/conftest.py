"""What the soft device does on one path or with several devices: each test runs on both event loops
and on every path, unless it says otherwise."""

from __future__ import annotations

import pytest
from conformance.devices import Devices, devices_named
from conformance.fixtures import engine, engines, pair, pairs, pytest_asyncio_loop_factories

from aioflagcx.config import SOFT_PATHS

__all__ = ["engine", "engines", "pair", "pairs", "pytest_asyncio_loop_factories"]


@pytest.fixture(params=SOFT_PATHS)
def devices(request: pytest.FixtureRequest) -> Devices:
    return devices_named(request.param)
