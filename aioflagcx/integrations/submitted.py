"""Transfers that were submitted, by the ids that callers ask for them with."""

from __future__ import annotations

import itertools
import operator
from collections import deque
from collections.abc import Iterable

from ..sync import Transfer

__all__ = ["Submitted"]


class Submitted:
    """All methods can be called on any thread.

    There is no lock: each use of ``_found`` and ``_unsettled`` is one operation.
    """

    def __init__(self, noun: str) -> None:
        """``noun``: what callers know them as."""
        self._noun = noun
        self._numbers = itertools.count(1)
        self._found: dict[int, _Outcome] = {}
        self._unsettled: deque[_Outcome] = deque()

    def add(self, transfer: Transfer) -> int:
        """Its id, from 1 up."""
        number, outcome = next(self._numbers), _Outcome(transfer)
        self._found[number] = outcome
        self._unsettled.append(outcome)
        self._settle()
        return number

    def done(self, number: int) -> bool:
        """Whether it is; then it is freed. Raises what it failed with, LookupError for no id."""
        number = operator.index(number)
        outcome = self._found.get(number)
        if outcome is not None and not outcome.known():
            return False
        if outcome is None or self._found.pop(number, None) is None:
            raise self._unknown(number)
        failure = outcome.failure()
        if failure is not None:
            raise failure
        return True

    def wait(self, numbers: Iterable[int]) -> None:
        """Until all have ended, and free them; raises as :meth:`done` does for the last failure.

        What is no id is such a failure, too.
        """
        failure: Exception | None = None
        found: dict[int, _Outcome] = {}
        for item in list(numbers):
            try:
                number = operator.index(item)
                found[number] = found.get(number) or self._found[number]
            except KeyError:
                failure = self._unknown(number)
            except Exception as error:
                failure = error
        for outcome in found.values():
            failure = outcome.failure() or failure
        for number in found:
            self._found.pop(number, None)
        if failure is not None:
            raise failure

    def _unknown(self, number: int) -> LookupError:
        return LookupError(f"{self._noun} {number} is unknown, or its end has been told")

    def _settle(self) -> None:
        """What has ended, up to the first that has not."""
        while True:
            try:
                outcome = self._unsettled.popleft()
            except IndexError:
                return
            if not outcome.settle():
                self._unsettled.appendleft(outcome)
                return


class _Outcome:
    """Of one transfer. All methods can be called on any thread."""

    __slots__ = ("_failure", "_transfer")

    def __init__(self, transfer: Transfer) -> None:
        self._transfer: Transfer | None = transfer
        self._failure: Exception | None = None

    def known(self) -> bool:
        transfer = self._transfer
        return transfer is None or transfer.done()

    def failure(self) -> Exception | None:
        """What it ended with; waits for that."""
        transfer = self._transfer
        return self._failure if transfer is None else transfer.exception()

    def settle(self) -> bool:
        """Let go of the transfer if its outcome is known: whether it is.

        A transfer holds the addresses of all its pieces, and there are callers that never ask.
        """
        if not self.known():
            return False
        self._failure = self.failure()  # before the transfer goes, for who reads both
        self._transfer = None
        return True
