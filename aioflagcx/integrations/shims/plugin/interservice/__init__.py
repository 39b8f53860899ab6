"""The package of FlagCX's interservice plugins, of which ours is a part."""

from __future__ import annotations

import pkgutil
from typing import Any

__path__ = pkgutil.extend_path(__path__, __name__)


def __getattr__(name: str) -> Any:
    from aioflagcx.integrations import originals

    return originals.attribute(__name__, name)
