"""Transfers that are waited for at once, and those that are asked for by an id."""

from __future__ import annotations

import itertools
import operator
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from ...config import Config
from ...sync import Engine, Transfer
from ..limits import SETTLE, call_timeout
from .types import TransferNotify, TransferOpcode

__all__ = ["Pieces", "Transfers"]


class Pieces(NamedTuple):
    """What to move: addresses here, addresses there, bytes."""

    local: int | Sequence[int]
    remote: int | Sequence[int]
    lengths: int | Sequence[int]

    @classmethod
    def one(cls, local: int, remote: int, length: int) -> Pieces:
        """A single piece; TypeError for what is no integer."""
        return cls(operator.index(local), operator.index(remote), operator.index(length))

    @classmethod
    def several(cls, local: Sequence[int], remote: Sequence[int], lengths: Sequence[int]) -> Pieces:
        """Equally many of each: the engine would take a single integer for all pieces."""
        counts = len(local), len(remote), len(lengths)
        if len(set(counts)) != 1:
            raise ValueError("{} buffers, {} peer buffer addresses and {} lengths".format(*counts))
        return cls(local, remote, lengths)


class _Batch:
    """What has been submitted and not been asked for. All methods can be called on any thread."""

    __slots__ = ("_failure", "_transfer")

    def __init__(self, transfer: Transfer) -> None:
        self._transfer: Transfer | None = transfer
        self._failure: Exception | None = None

    def done(self) -> bool:
        transfer = self._transfer
        return transfer is None or transfer.done()

    def failure(self) -> Exception | None:
        """What it ended with; waits for that."""
        transfer = self._transfer
        return self._failure if transfer is None else transfer.exception()

    def settle(self) -> bool:
        """Keep no more than the outcome, if there is one: whether there is.

        A transfer holds the addresses of all its pieces, and there are callers that never ask.
        """
        if not self.done():
            return False
        self._failure = self.failure()  # before the transfer goes, for who reads both
        self._transfer = None
        return True


class Transfers:
    """All of one engine. All methods can be called on any thread.

    ``_batches`` and ``_unsettled`` have no lock: each of their uses is one operation.
    """

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._config = config
        self._numbers = itertools.count(1)
        self._batches: dict[int, _Batch] = {}
        self._unsettled: deque[_Batch] = deque()

    def run(
        self, opcode: object, target: str, pieces: Pieces, notify: TransferNotify | None = None
    ) -> None:
        """Move them and, after that, notify the peer; raises as ``Engine.write`` does."""
        way, message = _opcode(opcode), _message(notify)
        timeout = call_timeout(self._config, pieces.lengths)
        end = time.monotonic() + timeout
        if way is TransferOpcode.Write:
            self._engine.write(target, *pieces, notify=message, timeout=timeout)
            return
        self._engine.read(target, *pieces, timeout=timeout)
        if message is not None:
            left = max(end - time.monotonic(), SETTLE)
            self._engine.write(target, (), (), (), notify=message, timeout=left)

    def submit(self, opcode: object, target: str, pieces: Pieces) -> int:
        """Begin to move them; the id of the batch that they are."""
        way = _opcode(opcode)
        submit = (
            self._engine.submit_write if way is TransferOpcode.Write else self._engine.submit_read
        )
        transfer = submit(target, *pieces, timeout=call_timeout(self._config, pieces.lengths))
        number, batch = next(self._numbers), _Batch(transfer)
        self._batches[number] = batch
        self._unsettled.append(batch)
        self._settle()
        return number

    def _settle(self) -> None:
        """What has ended, up to the first that has not."""
        while True:
            try:
                batch = self._unsettled.popleft()
            except IndexError:
                return
            if not batch.settle():
                self._unsettled.appendleft(batch)
                return

    def done(self, batch: int) -> bool:
        """Whether it is; then it is freed. Raises what it failed with, LookupError for no batch."""
        number = operator.index(batch)
        found = self._batches.get(number)
        if found is not None and not found.done():
            return False
        if found is None or self._batches.pop(number, None) is None:
            raise LookupError(f"batch {number} is unknown, or freed")
        failure = found.failure()
        if failure is not None:
            raise failure
        return True

    def wait(self, batches: Iterable[int]) -> None:
        """Until all have ended, and free them; raises as :meth:`done` does for the last failure.

        What is no id is such a failure, too.
        """
        failure: Exception | None = None
        found: dict[int, _Batch] = {}
        for batch in list(batches):
            try:
                number = operator.index(batch)
                found[number] = found.get(number) or self._batches[number]
            except KeyError:
                failure = LookupError(f"batch {number} is unknown, or freed")
            except Exception as error:
                failure = error
        for waited in found.values():
            failure = waited.failure() or failure
        for number in found:
            self._batches.pop(number, None)
        if failure is not None:
            raise failure


def _opcode(opcode: object) -> TransferOpcode:
    if not isinstance(opcode, int) or isinstance(opcode, bool):
        raise TypeError(f"opcode {opcode!r:.80}: expected a TransferOpcode")
    return TransferOpcode(opcode)


def _message(notify: TransferNotify | None) -> tuple[str, bytes] | None:
    if notify is None:
        return None
    if not isinstance(notify, TransferNotify):
        raise TypeError(f"notify {notify!r:.80}: expected a TransferNotify or None")
    if not isinstance(notify.name, str) or not isinstance(notify.msg, str):
        raise TypeError(f"{notify!r:.80}: name and msg must be str")
    return notify.name, notify.msg.encode(errors="surrogateescape")
