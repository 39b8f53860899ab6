"""The servers of ``inference_router.py``: a router, a prefill server and decode servers.

``model`` is the toy that they compute with, ``blocks`` hands out the blocks of a KV cache, ``web``
has what they share of HTTP.
"""

from __future__ import annotations
