"""The clients of a router, and how their answers are judged."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

from . import model
from .web import StreamBroken, lines

PROMPT_TOKENS = (64, 512)
ANSWER_TOKENS = (8, 24)

MOST_BLOCKS = model.blocks_for(PROMPT_TOKENS[1] + ANSWER_TOKENS[1])
"""Of the longest request."""

SETTLE_SECONDS = 30.0
"""How long the servers may take to come to the state that is waited for."""


@dataclasses.dataclass(frozen=True)
class Request:
    """What a client asks for."""

    prompt: list[int]
    max_tokens: int
    hang_up: str | None = None
    """At which line of the answer the client hangs up: "decode", when prefill is at work, or
    "token", the first one."""

    @classmethod
    def random(cls, rng: np.random.Generator, hang_up: str | None = None) -> Request:
        length = int(rng.integers(*PROMPT_TOKENS, endpoint=True))
        prompt = rng.integers(model.VOCABULARY, size=length).tolist()
        return cls(prompt, int(rng.integers(*ANSWER_TOKENS, endpoint=True)), hang_up)


@dataclasses.dataclass
class Answer:
    """What a client has got."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    checksum: str = ""
    attempts: int = 0
    error: str = ""
    first_seconds: float = 0.0
    """From sending the request to the first token."""
    seconds: float = 0.0
    """To the end of the answer."""

    def is_right(self, request: Request) -> bool:
        """Whether it is what the model answers when it is alone."""
        expected = model.answer(request.prompt, request.max_tokens)
        return not self.error and (self.tokens, self.checksum) == expected


class Load:
    """The clients of a router."""

    def __init__(
        self, router: str, http: aiohttp.ClientSession, bar: tqdm[Any], busy_after: int
    ) -> None:
        self._router = router
        self._http = http
        self._bar = bar
        self._answered = 0
        self._busy_after = busy_after
        self.busy: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        """The decode that sends the first token of an answer, once that many are complete."""

    async def run(self, requests: Sequence[Request]) -> list[Answer]:
        """Send them all at once; the answers in the same order."""
        return await asyncio.gather(*map(self._ask, requests))

    async def stats(self) -> dict[str, Any]:
        """What the router and the servers say of themselves."""
        async with self._http.get(f"{self._router}/stats") as answer:
            answer.raise_for_status()
            stats: dict[str, Any] = await answer.json()
            return stats

    async def stats_when(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The statistics once ``condition`` holds for them, or after SETTLE_SECONDS."""
        deadline = time.monotonic() + SETTLE_SECONDS
        while True:
            stats = await self.stats()
            if condition(stats) or time.monotonic() > deadline:
                return stats
            await asyncio.sleep(0.1)

    async def _ask(self, request: Request) -> Answer:
        answer = Answer()
        try:
            await self._stream(request, answer)
        except (aiohttp.ClientError, asyncio.TimeoutError, StreamBroken) as error:
            answer.error = f"{type(error).__name__}: {error}"
        if request.hang_up is None:
            self._answered += 1
            self._bar.update()
        return answer

    async def _stream(self, request: Request, answer: Answer) -> None:
        job = {"prompt": request.prompt, "max_tokens": request.max_tokens}
        decode = ""
        started = time.perf_counter()
        async with self._http.post(f"{self._router}/generate", json=job) as response:
            response.raise_for_status()
            async for message in lines(response):
                if request.hang_up in message:
                    return
                if "decode" in message:
                    decode = message["decode"]
                elif "token" in message:
                    if not answer.tokens:
                        answer.first_seconds = time.perf_counter() - started
                        self._see_busy(decode)
                    answer.tokens.append(message["token"])
                elif "error" in message:
                    answer.error = message["error"]
                else:
                    answer.checksum = message["checksum"]
                    answer.attempts = message["attempts"]
        answer.seconds = time.perf_counter() - started
        if not (answer.checksum or answer.error):
            answer.error = "the answer ended early"

    def _see_busy(self, decode: str) -> None:
        if self._answered >= self._busy_after and not self.busy.done():
            self.busy.set_result(decode)


def blocks_in_use(stats: dict[str, Any]) -> int:
    """Of all servers that the router can reach."""
    servers = [stats["prefill"], *(one["health"] for one in stats["decodes"].values())]
    return sum(one["blocks"] - one["free"] for one in servers if one is not None)
