"""Counters and gauges of an engine."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from .notifications import NotificationQueue
from .runtime import Runtime

__all__ = ["Stats"]


@dataclasses.dataclass(frozen=True)
class Stats:
    """A snapshot of an engine's counters, which only grow, and gauges.

    Taking one costs a few microseconds and waits for nothing.
    """

    bytes_written: int
    """Counter: bytes of completed slices of writes."""

    bytes_read: int
    """Counter: bytes of completed slices of reads."""

    transfers_submitted: int
    """Counter: transfers the native core took."""

    transfers_done: int
    """Counter: transfers of which every slice completed."""

    transfers_failed: int
    """Counter: transfers that failed or were stopped."""

    slices_posted: int
    """Counter: work requests posted, repeated ones included."""

    slices_reposted: int
    """Counter: work requests posted again after their endpoint failed."""

    rails: Mapping[str, int]
    """Counter: bytes of completed slices by rail, "local->remote" device names, of all peers: what
    each device carries."""

    rails_down: int
    """Gauge: rails of our sessions that are down, and tried again in the background."""

    endpoints_failed: int
    """Counter: endpoints that went into the error state."""

    wakeups: int
    """Counter: times the event loop was woken; below the number of transfers under load."""

    worker_sleeps: int
    """Counter: times a native worker went to sleep for want of work."""

    keepalive_wakeups: int
    """Counter: times the native keepalive thread woke up: once a ``keepalive_interval``, however
    many sessions there are, and when a session begins or ends."""

    transfers_inflight: int
    """Gauge: transfers in the native core."""

    transfers_pending: int
    """Gauge: transfers not done, those still connecting or confirming included."""

    bytes_inflight: int
    """Gauge: bytes posted and not completed."""

    regions: int
    """Gauge: regions registered."""

    sessions: int
    """Gauge: sessions that we opened and that have not been freed."""

    responders: int
    """Gauge: sessions that peers opened to us and that have not been fenced."""

    notifications_queued: int
    """Gauge: notifications waiting to be consumed."""

    notification_bytes_queued: int
    """Gauge: bytes of their names and payloads."""

    notifications_received: int
    """Counter: notifications put into the queue."""

    notifications_refused: int
    """Counter: notifications refused for want of room."""

    @classmethod
    def collect(cls, runtime: Runtime, queue: NotificationQueue) -> Stats:
        """From the native core's counters and what there is in Python."""
        others: dict[str, Any] = {
            "rails": runtime.native.rail_bytes(),
            "rails_down": sum(
                link.rails.down for link in runtime.events.links.values() if link.alive
            ),
            "transfers_pending": runtime.flights.pending(),
            "sessions": len(runtime.events.links),
            "responders": len(runtime.events.guests),
            "notifications_queued": len(queue),
            "notification_bytes_queued": queue.bytes,
            "notifications_received": queue.received,
            "notifications_refused": queue.refused,
        }
        known = {**runtime.native.stats(), **others}
        return cls(**{field.name: known[field.name] for field in dataclasses.fields(cls)})
