"""The states of a hand-over."""

from __future__ import annotations

import enum

__all__ = ["KVPoll"]


class KVPoll(enum.IntEnum):
    """How far a hand-over has come, on the side that is asked.

    A state only advances: a later one has a higher number, except for Failed, which is final and
    can follow every other but Success.
    """

    Failed = 0
    """It will not come about; the reason is the ``error`` of the sender or receiver."""
    Bootstrapping = 1
    """The two sides have not found each other yet."""
    WaitingForInput = 2
    """Both sides know where the blocks are; prefill has sent nothing yet."""
    Transferring = 3
    """Prefill has begun to send."""
    Success = 4
    """All blocks are in decode's memory."""
