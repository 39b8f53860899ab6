"""What one of vLLM's workers has of the connector: a thread with an event loop and an engine."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Mapping, Sequence

from ...config import Config
from ...engine import Engine
from ...errors import EngineClosed
from ...kv import CacheLayout
from ...sync.loop_thread import LoopThread
from .caches import GroupSpec, Tensor, cache_layout
from .channel import Server
from .decode import DecodeHalf
from .options import Options
from .prefill import PrefillHalf
from .results import Results, Stats
from .scheduler import Step

__all__ = ["Worker"]

_logger = logging.getLogger(__name__)


class Worker:
    """Called on the worker's thread; no call but :meth:`register` and :meth:`close` waits."""

    def __init__(
        self,
        specs: Sequence[GroupSpec],
        options: Options,
        *,
        rank: int = 0,
        ranks: int = 1,
        prefill: bool,
        decode: bool,
        config: Config | None = None,
    ) -> None:
        """``rank`` of ``ranks``: tensor-parallel. ``prefill``, ``decode``: what it is to do."""
        self._specs = tuple(specs)
        self._options = options
        self._rank = rank
        self._ranks = ranks
        self._roles = prefill, decode
        config = Config.from_env() if config is None else config
        if options.devices is not None:
            config = dataclasses.replace(config, devices=options.devices)
        self._config = config
        self._results = Results(by_request=len(self._specs) > 1)
        self._thread: LoopThread | None = None
        # On the loop's thread.
        self._stack = contextlib.AsyncExitStack()
        self._prefill: PrefillHalf | None = None
        self._decode: DecodeHalf | None = None

    def register(self, tensors: Mapping[str, Tensor]) -> None:
        """Start with these KV caches, by layer, whose memory stays until :meth:`close`.

        ValueError for caches that cannot be handed over; OSError when the side channel's port is
        taken; what :meth:`Engine.start` and :meth:`Engine.register_many` raise.
        """
        if self._thread is not None:
            raise RuntimeError("KV caches have been registered already")
        layout = cache_layout(tensors, self._specs, self._rank, self._ranks)
        self._thread = LoopThread()
        try:
            self._thread.run(lambda: self._open(layout))
        except BaseException:
            self.close()
            raise

    async def _open(self, layout: CacheLayout) -> None:
        options, stack = self._options, self._stack
        engine = await stack.enter_async_context(Engine(options.host, config=self._config))
        pools = {
            (address, group.pool_bytes)
            for group in layout.groups
            for layer in group.layers
            for address in layer
        }
        await engine.register_many(sorted(pools))
        layers = tuple(spec.layers for spec in self._specs)
        parts = engine, layout, layers, options, self._results
        prefill, decode = self._roles
        if prefill:
            self._prefill = PrefillHalf(*parts)
            server = Server(self._prefill.hear)
            server.open(options.host, options.port + self._rank)
            stack.push_async_callback(server.close)
            stack.push_async_callback(self._prefill.close)  # which has to say so
        if decode:
            self._decode = DecodeHalf(*parts)
            stack.push_async_callback(self._decode.close)
        _logger.info(
            "KV connector of rank %d of %d: engine %s, side channel %s",
            self._rank, self._ranks, engine.session_id,
            f"{options.host}:{options.port + self._rank}" if prefill else "none",
        )  # fmt: skip

    def step(self, step: Step) -> None:
        """Begin what the scheduler wants."""
        if step != Step():
            if self._thread is None:
                raise RuntimeError("no KV caches have been registered")
            self._thread.post(self._step, step)

    def _step(self, step: Step) -> None:
        if self._prefill is not None:
            for offer in step.offers:
                self._prefill.offer(offer)
            for transfer, reason in step.dropped:
                self._prefill.drop(transfer, reason)
        if self._decode is not None:
            for load in step.loads:
                self._decode.load(load)
            for request_id, reason in step.aborts:
                self._decode.abort(request_id, reason)
            for release in step.releases:
                self._decode.release(release)

    def take(self) -> tuple[set[str], set[str], set[str]]:
        """See :meth:`Results.take`."""
        return self._results.take()

    def take_invalid(self) -> set[int]:
        """See :meth:`Results.take_invalid`."""
        return self._results.take_invalid()

    def take_stats(self) -> Stats:
        """See :meth:`Results.take_stats`."""
        return self._results.take_stats()

    def close(self) -> None:
        """Give everything up, and return when nobody uses the caches any more. Idempotent."""
        thread, self._thread = self._thread, None
        if thread is not None:
            try:
                with contextlib.suppress(EngineClosed):
                    thread.run(self._stack.aclose)
            finally:
                thread.stop()
