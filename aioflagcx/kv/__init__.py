"""The hand-over of a request's KV cache from a prefill to a decode server.

:class:`KVManager` is where to start: one a server process. For each request there is a
:class:`KVSender` on prefill and a :class:`KVReceiver` on decode, joined by a room.
"""

from __future__ import annotations

from .layout import CacheGroup, CacheLayout
from .manager import KVManager
from .poll import KVPoll
from .receiver import KVReceiver
from .sender import KVSender

__all__ = ["CacheGroup", "CacheLayout", "KVManager", "KVPoll", "KVReceiver", "KVSender"]
