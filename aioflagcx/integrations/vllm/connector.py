"""vLLM's class of a KV connector, around :class:`.SchedulerHalf` and :class:`.Worker`.

The one module here that imports vLLM.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
from vllm.distributed.parallel_state import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
)
from vllm.utils.network_utils import get_ip
from vllm.v1.kv_cache_interface import (
    AttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from vllm.v1.metrics.cache_hit_source import CacheHitSource

from .caches import GroupSpec
from .options import Options
from .scheduler import SchedulerHalf, Step
from .worker import Worker

__all__ = ["AioFlagcxConnector"]


@dataclasses.dataclass
class StepMetadata(KVConnectorMetadata):
    """A step, on its way from the scheduler to the workers."""

    step: Step


class TransferStats(KVConnectorStats):
    """Of all workers; see :data:`.results.Stats`."""

    def reset(self) -> None:
        self.data: dict[str, Any] = {}

    def is_empty(self) -> bool:
        return not self.data

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        for name, value in other.data.items():
            self.data[name] = self.data[name] + value if name in self.data else value
        return self

    def reduce(self) -> dict[str, int | float]:
        """Without the list of failures, each of which is in the log."""
        return {name: value for name, value in self.data.items() if name != "failures"}


class AioFlagcxConnector(KVConnectorBase_V1, SupportsHMA):
    """Hands KV caches over by an :class:`aioflagcx.Engine`; see docs/integrations.md."""

    _cache_hit_source = CacheHitSource.P2P

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: Any
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer, parallel = vllm_config.kv_transfer_config, vllm_config.parallel_config
        for what in ("pipeline_parallel_size", "decode_context_parallel_size"):
            if getattr(parallel, what) != 1:
                raise ValueError(
                    f"AioFlagcxConnector: {what} = {getattr(parallel, what)}, only 1 is supported"
                )
        options = Options.of(transfer.kv_connector_extra_config)
        ranks = parallel.tensor_parallel_size
        # Each data-parallel replica has ports of its own.
        port = options.port + parallel.data_parallel_index * ranks
        options = dataclasses.replace(options, host=options.host or get_ip(), port=port)
        self._scheduler: SchedulerHalf | None = None
        self._worker: Worker | None = None
        if role == KVConnectorRole.SCHEDULER:
            specs = [group.kv_cache_spec for group in kv_cache_config.transfer_groups]
            self._scheduler = SchedulerHalf(
                options.host, port, ranks, [spec.block_size for spec in specs], map(_window, specs)
            )
        else:
            ranks = get_tensor_model_parallel_world_size()
            heads = vllm_config.model_config.get_total_num_kv_heads()
            self._worker = Worker(
                [
                    _group(group, kv_cache_config.num_blocks, heads, ranks)
                    for group in kv_cache_config.transfer_groups
                ],
                options,
                rank=get_tensor_model_parallel_rank(),
                ranks=ranks,
                prefill=transfer.is_kv_producer,
                decode=transfer.is_kv_consumer,
            )

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: VllmConfig) -> str | None:
        """Heads outside of tokens, so that a rank's share of a block is one piece."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    # The scheduler's half --------------------------------------------------------------------

    @property
    def _half(self) -> SchedulerHalf:
        assert self._scheduler is not None, "this is a worker's connector"
        return self._scheduler

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:
        ids: tuple[int, ...] = self._kv_cache_config.transfer_group_ids
        return ids

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        return self._half.matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        ids = blocks.get_unhashed_block_ids_all_groups()
        selected = self._kv_cache_config.select_transfer_block_ids(ids)
        self._half.allocated(request, selected, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return StepMetadata(self._half.step())

    def update_connector_output(self, connector_output: Any) -> None:
        self._half.loaded(connector_output.finished_recving or ())

    def request_finished(
        self, request: Any, block_ids: list[int]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self._half.finished(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        selected = self._kv_cache_config.select_transfer_block_ids(block_ids)
        return self._half.finished(request, selected)

    # The workers' half -----------------------------------------------------------------------

    @property
    def _own(self) -> Worker:
        assert self._worker is not None, "this is the scheduler's connector"
        return self._worker

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._own.register(kv_caches)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        metadata = self._connector_metadata
        assert isinstance(metadata, StepMetadata)
        self._own.step(metadata.step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing is loaded while a model runs."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any
    ) -> None:
        """Requests are sent when they are computed."""

    def wait_for_save(self) -> None:
        """Nothing is saved while a model runs."""

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, set[str] | None]:
        results = self.get_transfer_results(finished_req_ids)
        return results.finished_sending, results.finished_recving

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, received, failed = self._own.take()
        return KVConnectorTransferResults(sent, received, failed)

    def get_block_ids_with_load_errors(self) -> set[int]:
        return self._own.take_invalid()

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        stats = self._worker.take_stats() if self._worker is not None else None
        return TransferStats(data=stats) if stats else None

    @classmethod
    def build_kv_connector_stats(
        cls, data: dict[str, Any] | None = None
    ) -> KVConnectorStats | None:
        return TransferStats(data=data or {})

    def shutdown(self) -> None:
        if self._worker is not None:
            self._worker.close()


def _window(spec: Any) -> int:
    """Blocks of a request that a sliding window can reach; 0: all of them."""
    if not isinstance(spec, SlidingWindowSpec):
        return 0
    window, block = int(spec.sliding_window), int(spec.block_size)
    return -(-window // block) + 1


def _group(group: Any, blocks: int, total_heads: int, ranks: int) -> GroupSpec:
    specs = getattr(group.kv_cache_spec, "kv_cache_specs", {})
    heads = set()
    for name in group.layer_names:
        spec = specs.get(name, group.kv_cache_spec)
        if not isinstance(spec, AttentionSpec):
            raise ValueError(
                f"AioFlagcxConnector: layer {name} has a {type(spec).__name__}; only caches of "
                "attention can be handed over"
            )
        if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):  # every rank has it whole
            heads.add(1)
        elif spec.num_kv_heads == max(total_heads // ranks, 1):
            heads.add(total_heads)
        else:
            heads.add(spec.num_kv_heads * ranks)
    if len(heads) != 1:
        raise ValueError(
            f"AioFlagcxConnector: layers of one KV cache group have {sorted(heads)} KV heads"
        )
    return GroupSpec(tuple(group.layer_names), blocks, heads.pop())
