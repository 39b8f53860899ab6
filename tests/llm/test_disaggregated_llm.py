"""The example with a real transformer: `make test-llm`."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from example_programs import EXAMPLES, figures, run
from transformers import DynamicCache

from llm.model import (
    BLOCK_TOKENS,
    KV_HEADS,
    LAYERS,
    PROMPTS,
    WIDTH,
    Model,
    PagedCache,
    make_tokenizer,
)
from llm.servers import PrefillServer

SCRIPT = "disaggregated_llm.py"

pytestmark = pytest.mark.timeout(300)


@pytest.mark.parametrize("path", ["local", "tcp"])
def test_two_processes_answer_what_one_does_unless_a_block_is_spoiled(path: str) -> None:
    found = figures(SCRIPT, f"--path={path}")
    assert found["equal"] == found["prompts"] == len(PROMPTS)
    assert found["spoiled_differs"] is True
    assert min(found["prompt_tokens"]) > BLOCK_TOKENS  # more than one block each
    assert [len(answer) for answer in found["answers"]] == [24] * len(PROMPTS)
    assert len({tuple(answer) for answer in found["answers"]}) == len(PROMPTS)


def test_another_seed_is_another_model() -> None:
    one, other = (figures(SCRIPT, f"--seed={seed}", "--tokens=8")["answers"] for seed in (1, 2))
    assert one != other


def test_requests_wait_for_blocks() -> None:
    blocks = max(-(-len(make_tokenizer().encode(prompt).ids) // 16) for prompt in PROMPTS)
    figures(SCRIPT, f"--blocks={blocks}", "--tokens=4")


def test_a_request_that_no_pool_can_hold_ends_with_an_error() -> None:
    ended = run(SCRIPT, "--blocks=1", "--tokens=4")
    assert ended.returncode == 1
    assert "disaggregated_llm: " in ended.stderr


@contextlib.contextmanager
def front() -> Iterator[str]:
    """Its URL."""
    command = [sys.executable, EXAMPLES / SCRIPT, "--listen", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0


def test_the_front_streams_tokens_and_survives_who_hangs_up() -> None:
    def ask(url: str, prompt: str, count: int) -> urllib.request.Request:
        job = json.dumps({"prompt": prompt, "max_tokens": count}).encode()
        return urllib.request.Request(f"{url}/generate", data=job)

    prompt = "The quick brown wizard reads the whole prompt at once"
    with front() as url:
        for _ in range(3):
            with urllib.request.urlopen(ask(url, prompt, 10_000)) as answer:
                assert "token" in json.loads(answer.readline())
        with urllib.request.urlopen(ask(url, prompt, 12)) as answer:
            lines = [json.loads(line) for line in answer]
    tokenizer = make_tokenizer()
    ids = tokenizer.encode(prompt).ids
    assert tokenizer.decode(ids) == prompt
    assert [line["token"] for line in lines] == Model(0).alone(ids, 12)
    assert [line["text"] for line in lines] == [tokenizer.decode([one["token"]]) for one in lines]


async def test_blocks_are_not_given_back_while_the_accelerator_computes_into_them() -> None:
    begun, proceed = threading.Event(), threading.Event()

    def step(tokens: list[int], cache: Any) -> int:
        begun.set()
        proceed.wait()
        return 1

    stored: list[list[int]] = []
    cache = SimpleNamespace(blocks=4, store=lambda blocks, _: stored.append(blocks))
    model = SimpleNamespace(new_cache=lambda: None, step=step)
    server = PrefillServer(Any, cache, model)  # type: ignore[arg-type]
    request = asyncio.create_task(server._hand_over(Any, [1] * BLOCK_TOKENS))  # type: ignore[arg-type]
    await asyncio.to_thread(begun.wait)
    request.cancel()
    await asyncio.wait([request])
    assert server._pool.free == 3
    proceed.set()
    await server._pool.take(4)
    assert len(stored) == 1


def test_the_paged_cache_gives_back_what_was_stored() -> None:
    cache, tokens = DynamicCache(), 2 * BLOCK_TOKENS + 3
    shape = (1, KV_HEADS, tokens, WIDTH)
    for layer in range(LAYERS):
        cache.update(torch.randn(shape), torch.randn(shape), layer)
    pool = PagedCache(8)
    pool.store([6, 0, 3], cache)
    for ours, theirs in zip(pool.load([6, 0, 3], tokens).layers, cache.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
    pool.corrupt(0)
    assert not torch.equal(pool.load([6, 0, 3], tokens).layers[0].keys, cache.layers[0].keys)
