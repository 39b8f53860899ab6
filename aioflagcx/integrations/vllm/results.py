"""What the event loop has to tell the worker's thread, and through it vLLM's scheduler."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["Results", "Stats"]

Stats = dict[str, Any]
"""Sums since they were last taken, by name: ``sent_requests``, ``sent_bytes``, ``sent_seconds``,
``received_requests``, ``received_seconds``, ``failed_sends``, ``failed_loads``; and ``failures``, a
list of (request id, peer, reason)."""

_MAX_FAILURES = 100
"""That are listed between two steps; all are counted and logged."""


class Results:
    """Filled on the event loop, emptied on the worker's thread."""

    def __init__(self, *, by_request: bool) -> None:
        """``by_request``: failed loads are told by request, as block ids would be ambiguous."""
        self._by_request = by_request
        # Guards all below; nothing else is locked, called or waited for while it is held.
        self._lock = threading.Lock()
        self._sent: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._invalid: set[int] = set()
        self._stats: Stats = {}

    def sent(self, request_id: str) -> None:
        """Prefill's blocks of it are free."""
        with self._lock:
            self._sent.add(request_id)

    def received(self, request_id: str, invalid: tuple[tuple[int, ...], ...] = ()) -> None:
        """Decode's blocks of it are quiet; of each group those without the right content."""
        with self._lock:
            self._received.add(request_id)
            if any(invalid):
                if self._by_request:
                    self._failed.add(request_id)
                else:
                    self._invalid.update(*invalid)

    def count(self, **values: float) -> None:
        """Add to the sums."""
        with self._lock:
            for name, value in values.items():
                self._stats[name] = self._stats.get(name, 0) + value

    def failure(self, what: str, request_id: str, peer: str, reason: str) -> None:
        """Count and list a failure; ``what``: "failed_sends" or "failed_loads"."""
        self.count(**{what: 1})
        with self._lock:
            listed = self._stats.setdefault("failures", [])
            if len(listed) < _MAX_FAILURES:
                listed.append((request_id, peer, reason))

    def take(self) -> tuple[set[str], set[str], set[str]]:
        """Requests that were sent, were received or failed to be, and the latter alone."""
        with self._lock:
            taken = self._sent, self._received, self._failed
            self._sent, self._received, self._failed = set(), set(), set()
            return taken

    def take_invalid(self) -> set[int]:
        """Blocks of failed loads; at least of those that :meth:`take` has told before."""
        with self._lock:
            taken, self._invalid = self._invalid, set()
            return taken

    def take_stats(self) -> Stats:
        """The sums, which begin anew."""
        with self._lock:
            taken, self._stats = self._stats, {}
            return taken
