"""Mooncake's package: :mod:`mooncake.engine` is ours, the rest the original's, if it is there."""

from __future__ import annotations

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
