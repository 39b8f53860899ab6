from __future__ import annotations

from conformance.sync.fixtures import engines, pair, pairs

__all__ = ["engines", "pair", "pairs"]
