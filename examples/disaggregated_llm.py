"""A real transformer whose prefill and decode are different processes.

    python examples/disaggregated_llm.py                  # a few prompts, compared with one process
    python examples/disaggregated_llm.py --path tcp
    python examples/disaggregated_llm.py --listen 8080    # serve:
    curl -N localhost:8080/generate -d '{"prompt": "The quick brown", "max_tokens": 20}'

A small Llama with random weights, from a seed, on CPU. The prefill process computes the keys and
values of a prompt and hands them over by aioflagcx.kv; the decode process, which never sees the
prompt, generates from them. In front of the two is a server that takes prompts and streams tokens.

Each answer must be, token by token, that of a single process; and one request has a block of its
cache spoiled after the hand-over, so its answer must be another one. The exit status is 0 only if
all of that is so.

Needs PyTorch and transformers: pip install "aioflagcx[llm]"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
from aiohttp.web import Request, StreamResponse, post

import aioflagcx
import other_process
from aioflagcx.config import SOFT_PATHS, Config
from aioflagcx.errors import AioFlagcxError
from aioflagcx.kv import KVManager
from inference import web
from other_process import ChildFailed

REQUEST_SECONDS = 120.0


class Front:
    """Takes prompts and streams tokens: POST /generate {"prompt": text, "max_tokens": n}."""

    def __init__(
        self, http: aiohttp.ClientSession, prefill: dict[str, Any], decode: dict[str, Any]
    ) -> None:
        from llm.model import make_tokenizer

        self._http = http
        self._prefill = prefill
        self._decode = decode
        self._rooms = itertools.count()
        self.tokenizer = make_tokenizer()

    async def generate(self, request: Request) -> StreamResponse:
        """One line of JSON a token, with its text."""
        job = await request.json()
        response = await web.begin(request)
        try:
            async for token in self.tokens(job["prompt"], int(job.get("max_tokens", 16))):
                text = self.tokenizer.decode([token])
                await web.send(response, {"token": token, "text": text})
        except web.StreamBroken as error:
            await web.send(response, {"error": str(error)})
        return response

    async def tokens(self, prompt: str, count: int, *, corrupt: bool = False) -> AsyncIterator[int]:
        """The answer to a prompt; StreamBroken when there is none."""
        room = next(self._rooms)
        tokens = self.tokenizer.encode(prompt).ids
        prefilling = asyncio.ensure_future(
            self._post(f"{self._prefill['url']}/prefill", {"room": room, "tokens": tokens})
        )
        job = {
            "room": room,
            "tokens": len(tokens),
            "count": count,
            "prefill": self._prefill["session"],
            "corrupt": corrupt,
        }
        try:
            async with self._http.post(f"{self._decode['url']}/decode", json=job) as answer:
                async for line in web.lines(answer):
                    if "error" in line:
                        raise web.StreamBroken(line["error"])
                    yield line["token"]
            await prefilling
        except aiohttp.ClientError as error:
            raise web.StreamBroken(str(error)) from error
        finally:
            prefilling.cancel()

    async def _post(self, url: str, job: dict[str, Any]) -> None:
        async with self._http.post(url, json=job) as answer:
            answer.raise_for_status()


async def serve(options: argparse.Namespace, config: Config) -> None:
    """In a child: be one of the two servers."""
    from llm.model import Model, PagedCache
    from llm.servers import DecodeServer, PrefillServer

    model, cache = Model(options.seed), PagedCache(options.blocks)
    async with KVManager(options.serve, cache.group, config=config) as manager:
        kind = PrefillServer if options.serve == "prefill" else DecodeServer
        routes = kind(manager, cache, model).routes()
        async with web.serving("127.0.0.1", 0, routes) as url:
            other_process.tell({"url": url, "session": manager.session_id})
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def fronting(arguments: list[str]) -> AsyncIterator[Front]:
    """A front with its two servers."""
    async with contextlib.AsyncExitStack() as stack:
        command = [sys.executable, __file__, *arguments]
        children = [
            await stack.enter_async_context(other_process.start(role, [*command, "--serve", role]))
            for role in ("prefill", "decode")
        ]
        prefill, decode = [await child.hear() for child in children]
        http = await stack.enter_async_context(web.client(REQUEST_SECONDS))
        yield Front(http, prefill, decode)


async def demonstrate(options: argparse.Namespace, arguments: list[str]) -> bool:
    """Ask the prompts, all at once, and compare; whether all is as it has to be."""
    from llm.model import PROMPTS, Model

    async with fronting(arguments) as front:

        async def ask(prompt: str, corrupt: bool = False) -> list[int]:
            stream = front.tokens(prompt, options.tokens, corrupt=corrupt)
            return [token async for token in stream]

        answers = await asyncio.gather(*map(ask, PROMPTS))
        spoiled = await ask(PROMPTS[0], corrupt=True)
        model, tokenizer = Model(options.seed), front.tokenizer
    alone = [model.alone(tokenizer.encode(prompt).ids, options.tokens) for prompt in PROMPTS]
    equal = [ours == theirs for ours, theirs in zip(answers, alone, strict=True)]
    verified = all(equal) and spoiled != alone[0]
    if options.json:
        figures = {
            "prompts": len(PROMPTS),
            "prompt_tokens": [len(tokenizer.encode(prompt).ids) for prompt in PROMPTS],
            "equal": sum(equal),
            "spoiled_differs": spoiled != alone[0],
            "answers": answers,
            "verified": verified,
        }
        print(json.dumps(figures))
        return verified
    for prompt, answer, same in zip(PROMPTS, answers, equal, strict=True):
        print(f"{prompt[:40]!r}... -> {tokenizer.decode(answer)[:40]!r}: "
              f"{'as' if same else 'NOT as'} one process alone")  # fmt: skip
    print(f"with a spoiled block: {'another' if spoiled != alone[0] else 'THE SAME'} answer")
    return verified


async def listen(options: argparse.Namespace, arguments: list[str]) -> bool:
    """Serve until terminated."""
    async with fronting(arguments) as front:
        routes = [post("/generate", front.generate)]
        async with web.serving("127.0.0.1", options.listen, routes) as url:
            print(json.dumps({"url": url}), flush=True)
            await asyncio.Event().wait()
    return True


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=24, help="of an answer; %(default)s")
    parser.add_argument("--blocks", type=int, default=64, help="of each server; %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the weights; %(default)s")
    parser.add_argument("--path", choices=SOFT_PATHS, help="the soft device's only one")
    parser.add_argument("--listen", type=int, metavar="PORT", help="serve there; 0: a free port")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--serve", choices=("prefill", "decode"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    arguments = [f"--blocks={options.blocks}", f"--seed={options.seed}"]
    arguments += [f"--path={options.path}"] if options.path else []
    try:
        config = Config.from_env()
        if options.path:
            config = config.replace(soft_paths=(options.path,))
        if options.serve:
            aioflagcx.run(other_process.while_parent_lives(serve(options, config)))
            return 0
        work = listen if options.listen is not None else demonstrate
        good = aioflagcx.run(other_process.until_terminated(work(options, arguments)))
    except (AioFlagcxError, ImportError, OSError, ChildFailed, web.StreamBroken) as error:
        sys.stderr.write(f"disaggregated_llm: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    return 0 if good or good is None else 1


if __name__ == "__main__":
    sys.exit(main())
