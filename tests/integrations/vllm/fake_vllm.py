"""As much of vLLM as the connector's own module imports, for tests of that module."""

from __future__ import annotations

import dataclasses
import enum
import sys
from types import ModuleType
from typing import Any

import pytest


class Role(enum.Enum):
    SCHEDULER = 0
    WORKER = 1


class Base:
    def __init__(self, vllm_config: Any, role: Role, kv_cache_config: Any) -> None:
        self._connector_metadata: Any = None
        self._kv_cache_config = kv_cache_config

    def bind_connector_metadata(self, metadata: Any) -> None:
        self._connector_metadata = metadata


class Metadata:
    pass


class SupportsHMA:
    pass


@dataclasses.dataclass
class TransferResults:
    finished_sending: set[str]
    finished_recving: set[str]
    failed_recving: set[str]


@dataclasses.dataclass
class Stats:
    data: dict[str, Any] = dataclasses.field(default_factory=dict)


class Spec:
    """Of any layer."""

    def __init__(self, **values: Any) -> None:
        self.__dict__.update(values)


class AttentionSpec(Spec):
    pass


class MLAAttentionSpec(AttentionSpec):
    pass


class SlidingWindowSpec(AttentionSpec):
    pass


class SlidingWindowMLASpec(SlidingWindowSpec):
    pass


class HitSource(enum.Enum):
    P2P = 0


def install(monkeypatch: pytest.MonkeyPatch, *, rank: int = 0, ranks: int = 1) -> Any:
    """The connector's class, made with this vLLM."""
    v1 = "vllm.distributed.kv_transfer.kv_connector.v1"
    names: dict[str, dict[str, Any]] = {
        "vllm.config": {"VllmConfig": object},
        f"{v1}.base": {
            "KVConnectorBase_V1": Base,
            "KVConnectorMetadata": Metadata,
            "KVConnectorRole": Role,
            "KVConnectorTransferResults": TransferResults,
            "SupportsHMA": SupportsHMA,
        },
        f"{v1}.metrics": {"KVConnectorStats": Stats},
        "vllm.distributed.parallel_state": {
            "get_tensor_model_parallel_rank": lambda: rank,
            "get_tensor_model_parallel_world_size": lambda: ranks,
        },
        "vllm.utils.network_utils": {"get_ip": lambda: "127.0.0.1"},
        "vllm.v1.kv_cache_interface": {
            "AttentionSpec": AttentionSpec,
            "MLAAttentionSpec": MLAAttentionSpec,
            "SlidingWindowMLASpec": SlidingWindowMLASpec,
            "SlidingWindowSpec": SlidingWindowSpec,
        },
        "vllm.v1.metrics.cache_hit_source": {"CacheHitSource": HitSource},
    }
    for name, contents in names.items():
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            path = ".".join(parts[:end])
            if not isinstance(sys.modules.get(path), FakeModule):
                monkeypatch.setitem(sys.modules, path, FakeModule(path))
        sys.modules[name].__dict__.update(contents)
    monkeypatch.delitem(sys.modules, "aioflagcx.integrations.vllm.connector", raising=False)
    import aioflagcx.integrations.vllm as package

    monkeypatch.delattr(package, "connector", raising=False)
    return package.AioFlagcxConnector


class FakeModule(ModuleType):
    """With the attributes that were put there."""
