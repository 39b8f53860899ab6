"""Mooncake's package: :mod:`mooncake.engine` is ours, the rest the original's, if it is there."""

from __future__ import annotations

import pkgutil
from typing import Any

__path__ = pkgutil.extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    from aioflagcx.integrations import originals

    return originals.attribute(__name__, name)
