"""Settings of the connector: vLLM's ``kv_connector_extra_config``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ...waiting import seconds

__all__ = ["Options"]


@dataclasses.dataclass(frozen=True)
class Options:
    """All of them are optional."""

    host: str = ""
    """Address of this host, at which the engine and the side channel listen and peers find them.
    Empty: as vLLM determines it."""

    port: int = 14600
    """Of the side channel of prefill's rank 0; the other ranks take the next ones."""

    devices: str | None = None
    """As ``AIOFLAGCX_DEVICES``, which is the default: RDMA ports, or "soft"."""

    abort_timeout: float | None = 480.0
    """Seconds after which a transfer is given up: prefill keeps blocks that nobody fetches, and a
    fetch of what has not been computed, for so long; decode waits for its blocks for so long."""

    answer_timeout: float | None = 30.0
    """Seconds in which the other side's worker must answer."""

    fence_timeout: float | None = 1.0
    """Seconds in which a prefill must say that it has stopped, before it is fenced off."""

    @classmethod
    def of(cls, extra: Mapping[str, Any]) -> Options:
        """ValueError for what is no setting, or cannot be."""
        known = {field.name for field in dataclasses.fields(cls)}
        unknown = sorted(set(extra) - known)
        if unknown:
            raise ValueError(
                f"kv_connector_extra_config has {', '.join(map(repr, unknown))}; there are "
                f"{', '.join(sorted(known))}"
            )
        options = cls(**extra)
        if type(options.port) is not int or not 0 < options.port < 65_536:
            raise ValueError(f"port {options.port!r} is not in 1 to 65535")
        for name in ("abort_timeout", "answer_timeout", "fence_timeout"):
            try:
                seconds(getattr(options, name), None)
            except (TypeError, ValueError) as error:
                raise ValueError(f"{name}: {error}") from None
        return options
