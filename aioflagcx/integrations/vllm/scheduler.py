"""What vLLM's scheduler has of the connector: which requests the workers are to hand over.

No input and output, and nothing of vLLM: requests are its own objects, of which only the attributes
named in :class:`Request` are used. Belongs to the scheduler's thread.

The parameters of a request, ``kv_transfer_params``:

- on prefill: ``do_remote_decode`` true, and optionally ``transfer_id``, by default the request's
  id; at most :data:`.MAX_ROOM` bytes. The answer has the parameters for decode.
- on decode: ``do_remote_prefill`` true, ``transfer_id``, ``remote_host`` and ``remote_port`` of
  prefill's side channel, ``remote_tp_size`` (by default our own). A router that chooses
  ``transfer_id`` itself can send to both sides at once.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from ...kv.messages import MAX_ROOM

__all__ = ["Load", "Offer", "Release", "Request", "SchedulerHalf", "Step"]

_logger = logging.getLogger(__name__)

_MAX_RANKS = 256
"""Of a prefill: each may need a socket of its own."""

_COMPUTED = frozenset({"FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"})
"""States of requests that have their whole cache."""


class Request(Protocol):
    """What is used of vLLM's ``Request``."""

    request_id: str
    kv_transfer_params: dict[str, Any] | None
    num_prompt_tokens: int
    status: Any


@dataclasses.dataclass(frozen=True)
class Source:
    """Where decode finds what prefill has."""

    transfer: str
    host: str
    port: int
    """Of rank 0's side channel; those of the other ranks follow it."""
    ranks: int


@dataclasses.dataclass(frozen=True)
class Load:
    """Decode: have these blocks written, the last that the request has of each group."""

    request_id: str
    source: Source
    blocks: tuple[tuple[int, ...], ...]
    tokens: int
    """Of the prompt."""


@dataclasses.dataclass(frozen=True)
class Release:
    """Decode: nothing of this is needed."""

    request_id: str
    source: Source


@dataclasses.dataclass(frozen=True)
class Offer:
    """Prefill: these blocks, of the whole prompt, have been computed and may be fetched."""

    request_id: str
    transfer: str
    blocks: tuple[tuple[int, ...], ...]
    tokens: int
    """Of the prompt."""


@dataclasses.dataclass
class Step:
    """What a step of the scheduler has for the workers, in this order."""

    offers: list[Offer] = dataclasses.field(default_factory=list)
    dropped: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Prefill: transfers that will not be offered, and why."""
    loads: list[Load] = dataclasses.field(default_factory=list)
    aborts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """Decode: requests that are being loaded and were given up, and why."""
    releases: list[Release] = dataclasses.field(default_factory=list)


class SchedulerHalf:
    """Decides; the workers of a :class:`Step` carry it out."""

    def __init__(
        self,
        host: str,
        port: int,
        ranks: int,
        block_sizes: Sequence[int],
        windows: Iterable[int] | None = None,
    ) -> None:
        """``host``, ``port``: of our rank 0's side channel. ``ranks``: tensor-parallel ranks.
        ``block_sizes``: tokens of a block, of each group. ``windows``: of each group, how many of a
        prompt's last blocks are of use; 0, the default: all."""
        self._host = host
        self._port = port
        self._ranks = ranks
        self._block_sizes = tuple(block_sizes)
        self._windows = (0,) * len(self._block_sizes) if windows is None else tuple(windows)
        self._step = Step()
        self._loading: set[str] = set()

    def matched_tokens(self, request: Request, computed: int) -> tuple[int, bool]:
        """Of the prompt, how many tokens prefill has beyond ``computed``, and whether they are
        loaded between steps."""
        if self._source(request) is None:
            return 0, False
        count = request.num_prompt_tokens - computed
        return (count, True) if count > 0 else (0, False)

    def allocated(self, request: Request, blocks: Iterable[Sequence[int]], tokens: int) -> None:
        """The request has got blocks for ``tokens`` tokens of prefill: ``blocks``, of each group,
        those without a content."""
        source = self._source(request)
        if source is None:
            return
        assert request.kv_transfer_params is not None
        request.kv_transfer_params["do_remote_prefill"] = False  # once is enough
        if tokens == 0:  # all of it is here already
            self._step.releases.append(Release(request.request_id, source))
            return
        self._loading.add(request.request_id)
        self._step.loads.append(
            Load(request.request_id, source, self._clip(blocks), request.num_prompt_tokens)
        )

    def step(self) -> Step:
        """All that was decided since the last call."""
        step, self._step = self._step, Step()
        return step

    def loaded(self, request_ids: Iterable[str]) -> None:
        """All workers have reported these, loaded or not."""
        self._loading.difference_update(request_ids)

    def finished(
        self, request: Request, blocks: Sequence[Sequence[int]]
    ) -> tuple[bool, dict[str, Any] | None]:
        """A request has ended. Whether its blocks must stay until the workers report it as sent,
        and parameters for the answer.

        Blocks of one that is being loaded stay by vLLM's own doing, until it is reported as loaded.
        """
        request_id, params = request.request_id, request.kv_transfer_params
        if request_id in self._loading:
            self._step.aborts.append((request_id, f"vLLM ended it: {_state(request)}"))
            return False, None
        source = self._source(request)
        if source is not None:  # ended before it got blocks
            assert params is not None
            params["do_remote_prefill"] = False
            self._step.releases.append(Release(request_id, source))
            return False, None
        if not params or not params.get("do_remote_decode"):
            return False, None
        try:
            transfer = _transfer(params.get("transfer_id") or request_id)
        except ValueError as error:
            _logger.warning("request %s: nobody can fetch its KV cache: %s", request_id, error)
            return False, None
        if _state(request) not in _COMPUTED or not any(blocks):
            self._step.dropped.append((transfer, f"prefill ended it: {_state(request)}"))
            return False, None
        tokens = request.num_prompt_tokens
        # More than one token may have been generated, or room made for some.
        prompt = [
            ids[: -(-tokens // size)] for ids, size in zip(blocks, self._block_sizes, strict=True)
        ]
        self._step.offers.append(Offer(request_id, transfer, self._clip(prompt), tokens))
        return True, {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "transfer_id": transfer,
            "remote_host": self._host,
            "remote_port": self._port,
            "remote_tp_size": self._ranks,
        }

    def _source(self, request: Request) -> Source | None:
        params = request.kv_transfer_params
        if not params or not params.get("do_remote_prefill"):
            return None
        try:
            transfer, host = _transfer(params["transfer_id"]), params["remote_host"]
            if not isinstance(host, str) or not host:
                raise ValueError(f"remote_host {host!r} is no address")
            port, ranks = int(params["remote_port"]), int(params.get("remote_tp_size", self._ranks))
            if not 0 < ranks <= _MAX_RANKS or not 0 < port <= 65_536 - ranks:
                raise ValueError(f"remote_port {port} and remote_tp_size {ranks}")
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            _logger.warning(
                "request %s: kv_transfer_params %r is no source of its KV cache (%r); it is "
                "computed here", request.request_id, params, error,
            )  # fmt: skip
            params["do_remote_prefill"] = False
            return None
        return Source(transfer, host, port, ranks)

    def _clip(self, blocks: Iterable[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(ids[-window:] if window else ids)
            for ids, window in zip(blocks, self._windows, strict=True)
        )


def _transfer(value: object) -> str:
    """ValueError for what cannot be a transfer's id."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise ValueError(f"transfer_id {value!r} is neither a text nor a number")
    text = str(value)
    if not 0 < len(text.encode()) <= MAX_ROOM:
        raise ValueError(f"transfer_id {text:.40}... has not 1 to {MAX_ROOM} bytes in UTF-8")
    return text


def _state(request: Request) -> str:
    return str(request.status.name)
