"""Real servers of vLLM, prefill and decode, on this engine: `make test-vllm`."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from vllm_serve.servers import Answer, Router, Server, running

pytestmark = pytest.mark.timeout(900)

TOKENS = 32
"""Of an answer."""

SENTENCE = "Prefill reads the whole prompt at once, and decode writes the answer, token by token. "

LENGTHS = 2, 31, 32, 33, 200, 512, 901, 1500
"""Of the prompts, in tokens: blocks have 32, and decode computes the last token itself."""


def prompts(about: str) -> list[str]:
    return [(20 * SENTENCE + f"{index} {about}")[-length:] for index, length in enumerate(LENGTHS)]


PROMPTS = prompts("Prompt")

Answers = list[Answer]


@dataclasses.dataclass
class Servers:
    """Of one connector."""

    prefill: Server
    faulty: Server
    """A prefill whose engine does what it should not."""
    failing: Server
    """A decode that answers with an error when its blocks do not come."""
    recomputing: Server
    """A decode that computes the prompt itself when its blocks do not come."""
    fault: Path
    """What the faulty one does, see faults/faults.py."""

    def all(self) -> list[Server]:
        return [self.prefill, self.faulty, self.failing, self.recomputing]

    async def free(self) -> None:
        """Until no server has a block in use."""
        for server in self.all():
            await server.until("num_requests_running", 0)
            await server.until("num_requests_waiting", 0)
            await server.until("kv_cache_usage_perc", 0)


@pytest.fixture(scope="module", params=["MooncakeConnector", "AioFlagcxConnector"])
def servers(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """Prefill is started first."""
    folder = tmp_path_factory.mktemp("servers")
    fault = folder / "fault"
    found = Servers(
        Server(request.param, "producer", folder / "prefill.log"),
        Server(request.param, "producer", folder / "faulty.log", fault=fault),
        Server(request.param, "consumer", folder / "failing.log"),
        Server(request.param, "consumer", folder / "recomputing.log", "recompute"),
        fault,
    )
    with running(found.prefill, found.faulty), running(found.failing, found.recomputing):
        yield found


@pytest.fixture(scope="module")
def alone(servers: Servers) -> Answers:
    """What prefill answers without a decode server."""
    return asyncio.run(together(lambda prompt: servers.prefill.complete(prompt, TOKENS)))


async def together(ask: Callable[[str], Awaitable[Answer]], asked: list[str] = PROMPTS) -> Answers:
    return list(await asyncio.gather(*map(ask, asked)))


def contents(answers: Answers) -> list[tuple[int, tuple[int, ...], str]]:
    return [(answer.status, answer.tokens, answer.text) for answer in answers]


def test_the_answers_depend_on_the_prompts(alone: Answers) -> None:
    assert [answer.status for answer in alone] == [200] * len(PROMPTS)
    assert [len(answer.tokens) for answer in alone] == [TOKENS] * len(PROMPTS)
    assert len({answer.tokens for answer in alone}) == len(PROMPTS)


async def check(servers: Servers, alone: Answers) -> None:
    """The two answer what one does, in both orders, and no block stays in use."""
    router = Router(servers.prefill, servers.failing)
    answers = await together(lambda prompt: router.prefill_first(prompt, TOKENS))
    assert contents(answers) == contents(alone)
    answers = await router.decode_first(PROMPTS, TOKENS)
    assert contents(answers) == contents(alone)
    if servers.prefill.ours:
        answers = await together(lambda prompt: router.by_the_answer(prompt, TOKENS))
        assert contents(answers) == contents(alone)
    await servers.free()


async def test_two_servers_answer_what_one_does(servers: Servers, alone: Answers) -> None:
    await check(servers, alone)


async def test_a_prompt_of_one_token_needs_no_cache(servers: Servers) -> None:
    router = Router(servers.prefill, servers.failing)
    alone = await servers.prefill.complete("?", TOKENS)
    assert contents([await router.prefill_first("?", TOKENS)]) == contents([alone])
    await servers.free()


@pytest.mark.parametrize("fault", ["nothing", "flip"])
async def test_the_answers_depend_on_every_prompts_cache(servers: Servers, fault: str) -> None:
    servers.fault.write_text(fault)
    # Others than before: their blocks must not have been at decode already.
    asked = prompts(fault)
    alone = await together(lambda prompt: servers.prefill.complete(prompt, TOKENS), asked)
    router = Router(servers.faulty, servers.failing)
    answers = await together(lambda prompt: router.prefill_first(prompt, TOKENS), asked)
    assert [answer.status for answer in answers] == [200] * len(asked)
    equal = [
        length
        for length, answer, other in zip(LENGTHS, answers, alone, strict=True)
        if answer.tokens == other.tokens
    ]
    assert equal == []
    await servers.free()


async def test_a_failure_is_an_error_of_exactly_its_requests(
    servers: Servers, alone: Answers
) -> None:
    servers.fault.write_text("fail")
    failing, working = (
        Router(prefill, servers.failing) for prefill in (servers.faulty, servers.prefill)
    )

    async def ask(index: int, prompt: str) -> Answer:
        return await (failing if index % 2 else working).prefill_first(prompt, TOKENS)

    answers = await asyncio.gather(*(ask(*item) for item in enumerate(PROMPTS)))
    assert [answer.status for answer in answers] == [200, 500] * (len(PROMPTS) // 2)
    assert contents(list(answers[::2])) == contents(alone[::2])
    await servers.free()


async def test_a_failure_is_made_up_for_where_decode_may_recompute(
    servers: Servers, alone: Answers
) -> None:
    servers.fault.write_text("fail")
    router = Router(servers.faulty, servers.recomputing)
    answers = await together(lambda prompt: router.prefill_first(prompt, TOKENS))
    assert contents(answers) == contents(alone)
    await servers.free()


async def test_clients_that_hang_up_leave_no_block_in_use(servers: Servers, alone: Answers) -> None:
    router = Router(servers.prefill, servers.failing)
    waiting, offers = await router.decode_waits(PROMPTS, TOKENS)
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    await servers.failing.until("num_requests_waiting", 0)
    await router.prefill_offers(PROMPTS, offers)
    free = asyncio.create_task(servers.free())
    forgotten = b"expired before sending on P side"
    while not (await asyncio.wait([free], timeout=0.5))[0]:
        # Of a request whose client hangs up vLLM makes a second one, which asks for nothing of the
        # same transfer; its own connector's prefill serves one of the two, and says nothing to the
        # other. When that is the first, decode's block stays in use for ever.
        if not servers.prefill.ours and forgotten in servers.prefill.log.read_bytes():
            free.cancel()
            servers.failing.kill()
            servers.failing.start()
            await asyncio.to_thread(servers.failing.wait)
            break
    await check(servers, alone)


async def test_prefill_is_killed_and_started_again(servers: Servers, alone: Answers) -> None:
    """So that decode is the one that was started first."""
    prefill = servers.prefill
    lost = []
    if prefill.ours:  # the other connector learns of it by a timeout
        for decode in (servers.failing, servers.recomputing):
            answers, _ = await Router(prefill, decode).decode_waits(PROMPTS, TOKENS)
            lost.append(answers)
    prefill.kill()
    if prefill.ours:
        failed, recomputed = [await asyncio.gather(*answers) for answers in lost]
        assert [answer.status for answer in failed] == [500] * len(PROMPTS)
        assert contents(recomputed) == contents(alone)
    prefill.start()
    await asyncio.to_thread(prefill.wait)
    await check(servers, alone)
