"""What the shims stand in front of: packages of the same names, further down the path."""

from __future__ import annotations

import importlib.util
import sys
import threading
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

__all__ = ["attribute"]

_SHIMS = Path(__file__).resolve().parent / "shims"

_loading = threading.RLock()
"""Guards `_loaded`."""

_loaded: dict[str, ModuleType] = {}
"""Originals by name, from the beginning of their loading on."""


def attribute(module: str, name: str) -> Any:
    """What the original of a shim's module has under that name, for the shim's ``__getattr__``.

    The original is loaded when this first asks for it. Raises AttributeError if there is none, or
    if it has no such name; and what it raises itself.
    """
    if not name.startswith("__") and not _is_module(module, name):
        with _loading:
            original = _loaded.get(module) or _load(module)
        if original is not None:
            return getattr(original, name)
    raise AttributeError(f"module {module!r} has no attribute {name!r}")


def _is_module(package: str, name: str) -> bool:
    """Whether ``from package import name`` means a module, which the import system finds."""
    path = getattr(sys.modules[package], "__path__", None)
    return path is not None and PathFinder.find_spec(f"{package}.{name}", path) is not None


def _load(module: str) -> ModuleType | None:
    spec = _find(module)
    if spec is None or spec.loader is None:
        return None
    original = _loaded[module] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(original)
    except BaseException:
        del _loaded[module]
        raise
    return original


def _find(module: str) -> ModuleSpec | None:
    """As the import system would, did it not find the shim first."""
    parent = module.rpartition(".")[0]
    path = sys.modules[parent].__path__ if parent else sys.path
    others = [entry for entry in path if not _is_shim(entry)]
    spec = PathFinder.find_spec(module, others)
    if spec is None or spec.origin is None or spec.submodule_search_locations is not None:
        return spec
    # Under a name of its own, as an extension module replaces what has its name in sys.modules.
    return importlib.util.spec_from_file_location(f"original.{module}", spec.origin)


def _is_shim(entry: str) -> bool:
    folder = Path(entry).resolve()
    return folder == _SHIMS or _SHIMS in folder.parents
