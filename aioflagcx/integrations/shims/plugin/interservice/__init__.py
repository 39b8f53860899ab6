"""The package of FlagCX's interservice plugins, of which ours is a part."""

from __future__ import annotations

import pkgutil

__path__ = pkgutil.extend_path(__path__, __name__)
