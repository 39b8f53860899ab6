"""Codes in place of exceptions, and what became of the reasons."""

from __future__ import annotations

import copy
import functools
import logging
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, TypeVar

from ...errors import AioFlagcxError, TransferError

__all__ = ["Answering", "answers"]

_logger = logging.getLogger(__name__)

_S = TypeVar("_S", bound="Answering")
_T = TypeVar("_T")
_P = ParamSpec("_P")

_EXPECTED = (AioFlagcxError, ValueError, TypeError, OverflowError, LookupError, TimeoutError)
"""What a caller or a peer can bring about; anything else is logged with its traceback."""


class Answering:
    """What has methods that are decorated with :func:`answers`."""

    def __init__(self) -> None:
        self._thread = threading.local()
        self._reason = ""

    def last_error(self) -> str:
        """Why the last call failed that did so on this thread or, if none did, on any; or ""."""
        return getattr(self._thread, "reason", self._reason)

    def _failed(self, call: str, error: Exception) -> None:
        words = str(error) or type(error).__name__
        if not isinstance(error, AioFlagcxError):
            words = f"{type(error).__name__}: {words}"
        if isinstance(error, TransferError) and not error.remote_quiet:
            words += "; the peer did not confirm that it is over: what was written may still change"
        self._thread.reason = self._reason = f"{call}: {words}"
        if isinstance(error, _EXPECTED):
            _logger.warning("%s: %s", call, words)
        else:
            _logger.error("%s: %s", call, words, exc_info=error)


def answers(
    failure: _T,
) -> Callable[[Callable[Concatenate[_S, _P], _T]], Callable[Concatenate[_S, _P], _T]]:
    """Makes a method answer ``failure`` in place of raising, and keep and log the reason."""

    def decorate(method: Callable[Concatenate[_S, _P], _T]) -> Callable[Concatenate[_S, _P], _T]:
        @functools.wraps(method)
        def answer(self: _S, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
            try:
                return method(self, *args, **kwargs)
            except Exception as error:
                self._failed(method.__name__, error)
                return copy.copy(failure)  # a list would be everybody's

        return answer

    return decorate
