"""Every failure as the RuntimeError that FlagCX's wrapper raises."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from ...errors import AioFlagcxError

__all__ = ["ArgumentError", "raises_runtime_errors"]

_P = ParamSpec("_P")
_T = TypeVar("_T")


class ArgumentError(RuntimeError, ValueError):
    """The arguments cannot be. Of both types, as the original raises ValueError for some."""


def raises_runtime_errors(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Make a function raise nothing else, with its name and the reason."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        try:
            return function(*args, **kwargs)
        except (AioFlagcxError, TimeoutError, RuntimeError) as error:
            raise RuntimeError(f"{function.__name__}: {error}") from error
        except (TypeError, ValueError, OverflowError, LookupError) as error:
            raise ArgumentError(f"{function.__name__}: {error}") from error
        except Exception as error:
            words = f"{type(error).__name__}: {error}"
            raise RuntimeError(f"{function.__name__}: {words}") from error

    return call
