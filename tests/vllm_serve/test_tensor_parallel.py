"""vLLM's servers with our connector, of different tensor-parallel sizes on the two sides.

In float32: each number of ranks rounds its sums differently, which in bfloat16 decides between two
tokens now and then.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from vllm_serve.servers import Router, Server, running
from vllm_serve.test_vllm_serve import TOKENS, contents, prompts

pytestmark = pytest.mark.timeout(900)

Servers = dict[int, Server]
"""By their tensor-parallel size."""


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Servers, Servers]]:
    """Prefill's and decode's."""
    folder = tmp_path_factory.mktemp("servers")

    def server(role: str, ranks: int) -> Server:
        return Server(
            "AioFlagcxConnector", role, folder / f"{role}-{ranks}.log",
            options=("--dtype", "float32", "--tensor-parallel-size", str(ranks)),
        )  # fmt: skip

    prefill, decode = (
        {ranks: server(role, ranks) for ranks in (1, 2)} for role in ("producer", "consumer")
    )
    with running(*prefill.values(), *decode.values()):
        yield prefill, decode


@pytest.mark.parametrize(("prefill_ranks", "decode_ranks"), [(1, 2), (2, 1), (2, 2)])
async def test_each_rank_gets_its_heads(
    servers: tuple[Servers, Servers], prefill_ranks: int, decode_ranks: int
) -> None:
    prefill, decode = servers[0][prefill_ranks], servers[1][decode_ranks]
    router = Router(prefill, decode, prefill_ranks)
    # Others than before, and first by way of prefill: their blocks must not have been at decode
    # already. One after the other: vLLM's ranks spin while a prompt of theirs waits to be fetched,
    # and those of the other server need the processors.
    asked = prompts(f"{prefill_ranks} to {decode_ranks}")
    answers = [await router.prefill_first(prompt, TOKENS) for prompt in asked]
    alone = [await decode.complete(prompt, TOKENS) for prompt in asked]
    assert [answer.status for answer in alone] == [200] * len(asked)
    assert contents(answers) == contents(alone)
    for server in (prefill, decode):
        await server.until("kv_cache_usage_perc", 0)
