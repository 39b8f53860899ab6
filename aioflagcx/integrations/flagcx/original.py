"""FlagCX's own wrapper, for everything that is not the point-to-point engine."""

from __future__ import annotations

import importlib.util
import sys
import threading
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

__all__ = ["Missing", "find_original", "resolve"]

_FILE = Path("plugin", "interservice", "flagcx_wrapper.py")
_NAME = "aioflagcx.integrations.flagcx.original_wrapper"

_SHIMS = Path(__file__).resolve().parent.parent / "shims"

_loading = threading.RLock()


def find_original() -> ModuleType | None:
    """The module, loaded from the first folder of sys.path that has it and is not ours.

    None if there is none, at this time: clients add its folder to sys.path by themselves. Raises
    what the module raises when it is loaded.
    """
    with _loading:
        loaded = sys.modules.get(_NAME)
        if loaded is not None:
            return loaded
        for entry in list(sys.path):
            file = Path(entry or ".") / _FILE
            if not file.is_file() or _SHIMS in file.resolve().parents:
                continue
            spec = importlib.util.spec_from_file_location(_NAME, file)
            assert spec is not None and spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[_NAME] = module
            try:
                spec.loader.exec_module(module)
            except BaseException:
                del sys.modules[_NAME]
                raise
            return module
    return None


def resolve(name: str) -> Any:
    """That name of the original or, if there is none, something that cannot be used.

    So clients can import all they want, and use what is there.
    """
    if name.startswith("_"):
        raise AttributeError(name)
    original = find_original()
    return Missing(name) if original is None else getattr(original, name)


class Missing:
    """Stands for a name of FlagCX's own wrapper; each use raises NotImplementedError."""

    def __init__(self, name: str) -> None:
        self._missing_name = name

    def _fail(self) -> NoReturn:
        raise NotImplementedError(
            f"{self._missing_name} is none of FlagCX's point-to-point calls, which are all that "
            f"aioflagcx stands in for: put the folder that has FlagCX's own {_FILE} into PYTHONPATH"
        )

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        self._fail()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):
            raise AttributeError(name)
        self._fail()

    def __repr__(self) -> str:
        return f"<missing {self._missing_name}>"
