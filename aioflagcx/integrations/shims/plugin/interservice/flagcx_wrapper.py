"""``from plugin.interservice.flagcx_wrapper import FLAGCXLibrary`` gives ours."""

from __future__ import annotations

from typing import Any

from aioflagcx.integrations import flagcx
from aioflagcx.integrations.flagcx import *  # noqa: F403


def __getattr__(name: str) -> Any:
    return getattr(flagcx, name)
