"""The connector's class, as vLLM calls it. `make test-vllm` has the real one."""

from __future__ import annotations

import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from integrations.processes import until
from integrations.vllm import fake_vllm
from integrations.vllm.fake_vllm import AttentionSpec, MLAAttentionSpec, Role, SlidingWindowSpec
from integrations.vllm.servers import free_ports
from integrations.vllm.tensors import as_tensor

from aioflagcx.errors import ConfigError
from aioflagcx.integrations.vllm.caches import GroupSpec

BLOCKS, HEADS, TOKENS, WIDTH = 8, 2, 4, 16


def config(role: str, port: int, **parallel: Any) -> Any:
    return SimpleNamespace(
        kv_transfer_config=SimpleNamespace(
            kv_connector_extra_config={"port": port, "devices": "soft"},
            is_kv_producer=role == "kv_producer",
            is_kv_consumer=role == "kv_consumer",
        ),
        parallel_config=SimpleNamespace(
            **{
                "pipeline_parallel_size": 1,
                "decode_context_parallel_size": 1,
                "tensor_parallel_size": 1,
                "data_parallel_index": 0,
                **parallel,
            }
        ),
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: HEADS, use_mla=False),
    )


def caches(*specs: Any) -> Any:
    """A KVCacheConfig, all of whose groups are handed over."""
    groups = [
        SimpleNamespace(layer_names=[f"layer{index}"], kv_cache_spec=spec)
        for index, spec in enumerate(specs)
    ]
    return SimpleNamespace(
        num_blocks=BLOCKS,
        transfer_groups=tuple(groups),
        transfer_group_ids=tuple(range(len(groups))),
        select_transfer_block_ids=tuple,
    )


def request(params: Any) -> Any:
    return SimpleNamespace(
        request_id="r",
        kv_transfer_params=params,
        num_prompt_tokens=8,
        status=SimpleNamespace(name="FINISHED_LENGTH_CAPPED"),
    )


class Side:
    """The two connectors of one vLLM, and its cache."""

    def __init__(self, connector: Any, role: str, port: int) -> None:
        self.cache = np.zeros((BLOCKS, HEADS, TOKENS, WIDTH), np.int16)
        cache_config = caches(AttentionSpec(num_kv_heads=HEADS, block_size=TOKENS))
        self.scheduler = connector(config(role, port), Role.SCHEDULER, cache_config)
        self.worker = connector(config(role, port), Role.WORKER, cache_config)
        self.worker.register_kv_caches({"layer0": as_tensor(self.cache)})

    def step(self) -> Any:
        """What the worker answers to what the scheduler wants."""
        self.worker.bind_connector_metadata(
            pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(None)))
        )
        self.worker.start_load_kv(None, request_ids=[])
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        results.invalid = self.worker.get_block_ids_with_load_errors()
        self.scheduler.update_connector_output(results)
        return results


def test_a_request_goes_from_one_vllm_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = fake_vllm.install(monkeypatch)
    port = free_ports()
    prefill, decode = Side(connector, "kv_producer", port), Side(connector, "kv_consumer", 1)
    prefill.cache[:] = np.random.default_rng(3).integers(1, 999, prefill.cache.shape)
    stay, params = prefill.scheduler.request_finished_all_groups(
        request({"do_remote_decode": True}), ([3, 4],)
    )
    assert stay
    prefill.step()
    wanted = request(params)
    assert decode.scheduler.get_num_new_matched_tokens(wanted, 0) == (8, True)
    blocks = SimpleNamespace(get_unhashed_block_ids_all_groups=lambda: [[6, 2]])
    decode.scheduler.update_state_after_alloc(wanted, blocks, 8)
    results = decode.step()
    until(lambda: "r" in results.finished_recving or results.__dict__.update(vars(decode.step())))
    assert not results.invalid and not results.failed_recving
    assert (decode.cache[[6, 2]] == prefill.cache[[3, 4]]).all()
    until(lambda: "r" in prefill.step().finished_sending)
    stats = prefill.worker.get_kv_connector_stats()
    assert stats.reduce()["sent_requests"] == 1
    more = connector.build_kv_connector_stats({"sent_requests": 2, "failures": [("r", "p", "w")]})
    assert stats.aggregate(more).reduce()["sent_requests"] == 3
    assert "failures" not in stats.reduce() and stats.data["failures"]
    assert prefill.worker.get_kv_connector_stats() is None
    for side in (prefill, decode):
        side.worker.shutdown()
        side.scheduler.shutdown()


def test_replicas_have_ports_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = fake_vllm.install(monkeypatch)
    scheduler = connector(
        config("kv_producer", 5000, tensor_parallel_size=4, data_parallel_index=2),
        Role.SCHEDULER,
        caches(AttentionSpec(num_kv_heads=1, block_size=TOKENS)),
    )
    _, params = scheduler.request_finished(request({"do_remote_decode": True}), [1])
    assert params["remote_port"] == 5008


def test_the_engine_has_the_settings_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = fake_vllm.install(monkeypatch)
    monkeypatch.setenv("AIOFLAGCX_CONNECT_TIMEOUT", "soon")
    with pytest.raises(ConfigError, match="AIOFLAGCX_CONNECT_TIMEOUT"):
        connector(
            config("kv_producer", 5000), Role.WORKER, caches(AttentionSpec(num_kv_heads=HEADS))
        )


@pytest.mark.parametrize("what", ["pipeline_parallel_size", "decode_context_parallel_size"])
def test_what_cannot_be_divided_so_is_refused(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    connector = fake_vllm.install(monkeypatch)
    with pytest.raises(ValueError, match=f"{what} = 2, only 1"):
        connector(config("kv_producer", 5000, **{what: 2}), Role.SCHEDULER, caches())


def test_groups_get_the_heads_of_their_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_vllm.install(monkeypatch)
    from aioflagcx.integrations.vllm.connector import _group, _window

    def group(spec: Any, total: int, ranks: int) -> GroupSpec:
        return _group(SimpleNamespace(layer_names=["a"], kv_cache_spec=spec), 8, total, ranks)

    assert group(AttentionSpec(num_kv_heads=2), 8, 4).heads == 8
    assert group(AttentionSpec(num_kv_heads=1), 2, 4).heads == 2
    assert group(AttentionSpec(num_kv_heads=4), 8, 4).heads == 16  # not the model's own kind
    assert group(MLAAttentionSpec(num_kv_heads=1), 16, 4).heads == 1
    assert group(fake_vllm.SlidingWindowMLASpec(num_kv_heads=1), 16, 4).heads == 1
    with pytest.raises(ValueError, match="layer a has a Spec; only caches of attention"):
        group(fake_vllm.Spec(), 8, 1)
    each = {"a": AttentionSpec(num_kv_heads=8), "b": MLAAttentionSpec(num_kv_heads=1)}
    mixed = SimpleNamespace(
        layer_names=["a", "b"], kv_cache_spec=fake_vllm.Spec(kv_cache_specs=each)
    )
    with pytest.raises(ValueError, match=r"have \[1, 8\] KV heads"):
        _group(mixed, 8, 8, 1)
    assert _window(AttentionSpec()) == 0
    assert _window(SlidingWindowSpec(sliding_window=100, block_size=32)) == 5


def test_heads_come_before_tokens_where_there_are_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = fake_vllm.install(monkeypatch)
    vllm = config("kv_producer", 5000)
    assert connector.get_required_kvcache_layout(vllm) == "LBHNC"
    vllm.model_config.use_mla = True
    assert connector.get_required_kvcache_layout(vllm) is None


def test_only_the_connector_itself_imports_vllm() -> None:
    program = (
        "import sys, aioflagcx.integrations.vllm.worker, aioflagcx.integrations.vllm.scheduler\n"
        "assert 'vllm' not in sys.modules and 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
