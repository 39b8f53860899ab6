from __future__ import annotations

import pytest
from conformance.devices import Devices, devices_named
from conformance.sync.fixtures import engines, pair, pairs

from aioflagcx.config import SOFT_PATHS

__all__ = ["engines", "pair", "pairs"]


@pytest.fixture(params=SOFT_PATHS)
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def devices(path: str) -> Devices:
    return devices_named(path)
