"""Transfers that are waited for at once, and those that are asked for by an id."""

from __future__ import annotations

import operator
import time
from collections.abc import Sequence
from typing import NamedTuple

from ...config import Config
from ...sync import Engine
from ..limits import SETTLE, call_timeout
from ..submitted import Submitted
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


class Transfers:
    """All of one engine. All methods can be called on any thread."""

    def __init__(self, engine: Engine, config: Config) -> None:
        self._engine = engine
        self._config = config
        self.submitted = Submitted("batch")

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
        return self.submitted.add(transfer)


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
