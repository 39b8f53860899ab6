"""A router in front of a prefill server and several decode servers, and many clients at once.

    python examples/inference_router.py                  # 200 requests at once, 2 decodes
    python examples/inference_router.py --kill           # a decode dies in the middle
    python examples/inference_router.py --stall          # a decode stops for a while, and goes on

Each server is a process of its own, on uvloop, and they talk HTTP. For each request the router
picks the decode with the fewest blocks in use; the decode offers blocks of its KV cache, prefill
computes the cache of the prompt and writes it there in one `write`, whose notification starts the
decode; the router streams the tokens to the client. When a decode is lost, its requests go on at
another one, from where they were.

The model is a toy, but its answers need every byte of the right cache: the decodes never see a
prompt. Each answer, and a checksum of each cache as it is at the end, is compared with what the
model gives alone. Some more clients hang up early (--hang-ups), wherever their requests are just
then; their blocks must not be given to others before nothing can be written to them any more.
inference/decode.py says when that is. At the end every block must have come back.

The servers also run by themselves, on other machines, too:

    python examples/inference_router.py --serve decode --host 10.0.0.2 --port 8001
    python examples/inference_router.py --serve prefill --host 10.0.0.1 --port 8000
    python examples/inference_router.py --serve router --host 10.0.0.1 --port 9000 \\
        --prefill http://10.0.0.1:8000 --decode http://10.0.0.2:8001 http://10.0.0.3:8001
    python examples/inference_router.py --router http://10.0.0.1:9000

Needs aiohttp and tqdm: pip install "aioflagcx[examples]"
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import numpy as np
from tqdm import tqdm

import aioflagcx
import other_process
from aioflagcx.config import SOFT_PATHS, Config
from aioflagcx.errors import AioFlagcxError
from inference import web
from inference.clients import MOST_BLOCKS, Answer, Load, Request, blocks_in_use
from inference.decode import DecodeServer
from inference.prefill import PrefillServer
from inference.router import REQUEST_SECONDS, Router

HANG_UPS = ("decode", "token")
STALL_SECONDS = 3.0  # after the router has given the decode up
MiB = 1 << 20


@dataclasses.dataclass
class Result:
    """What a run came to."""

    requests: list[Request]
    answers: list[Answer]
    seconds: float
    stats: dict[str, Any]
    trouble: str


async def measure(
    options: argparse.Namespace, router: str, decodes: dict[str, other_process.Child]
) -> Result:
    """Send the requests; meanwhile, kill or stop a decode that is at work."""
    rng = np.random.default_rng(options.seed)
    requests = [Request.random(rng) for _ in range(options.requests)]
    hanging_up = [Request.random(rng, HANG_UPS[i % 2]) for i in range(options.hang_ups)]
    # With --stall the other half comes when the decode is back, to blocks that it had in use.
    at_once = len(requests) // 2 if options.stall else len(requests)
    started = time.perf_counter()
    with tqdm(total=len(requests), desc="answers", disable=None) as bar:
        async with web.client(REQUEST_SECONDS + 10) as http:
            load = Load(router, http, bar, at_once // 4)
            work = asyncio.ensure_future(load.run(hanging_up + requests[:at_once]))
            trouble = asyncio.ensure_future(disturb(options, load, decodes))
            try:
                answers = (await work)[len(hanging_up) :]
                if not load.busy.done():
                    trouble.cancel()
                await asyncio.wait([trouble])
            finally:
                work.cancel()
                trouble.cancel()
                await asyncio.wait([work, trouble])
            answers += await load.run(requests[at_once:])
            seconds = time.perf_counter() - started
            stats = await load.stats_when(lambda stats: not blocks_in_use(stats))
            words = "none" if trouble.cancelled() else trouble.result()
            return Result(requests, answers, seconds, stats, words)


async def disturb(
    options: argparse.Namespace, load: Load, decodes: dict[str, other_process.Child]
) -> str:
    """Kill or stop a decode that is at work, if that is asked for; what was done."""
    name = await load.busy
    if options.kill:
        decodes[name].kill()
        return f"{name} was killed"
    if options.stall:
        await stall(decodes[name].pid, name, load)
        return f"{name} was stopped for a while"
    return "none"


async def stall(pid: int, name: str, load: Load) -> None:
    """Stop a decode until the router has given it up and the engines have lost it."""
    os.kill(pid, signal.SIGSTOP)
    try:
        await load.stats_when(lambda stats: not stats["decodes"][name]["up"])
        await asyncio.sleep(STALL_SECONDS)
    finally:
        os.kill(pid, signal.SIGCONT)
    await load.stats_when(lambda stats: bool(stats["decodes"][name]["up"]))


@contextlib.asynccontextmanager
async def all_servers(
    options: argparse.Namespace,
) -> AsyncIterator[tuple[str, dict[str, other_process.Child]]]:
    """The router's URL and the decodes by name, all of them processes of ours."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(role: str, *arguments: str) -> other_process.Child:
            command = [sys.executable, __file__, "--as-child", f"--serve={role}", *arguments]
            command += [f"--host={options.host}", f"--blocks={options.blocks}"]
            if options.path is not None:
                command.append(f"--path={options.path}")
            return await stack.enter_async_context(other_process.start(role, command))

        decodes = {f"decode-{n + 1}": await start("decode") for n in range(options.decodes)}
        prefill = await start("prefill")
        urls = [(await child.hear())["url"] for child in (prefill, *decodes.values())]
        router = await start("router", "--prefill", urls[0], "--decode", *urls[1:])
        yield (await router.hear())["url"], decodes


async def demo(options: argparse.Namespace) -> Result:
    """All servers and all clients on this machine."""
    async with all_servers(options) as (router, decodes):
        return await measure(options, router, decodes)


async def serve(options: argparse.Namespace, config: Config) -> None:
    """One of the servers, until it is cancelled; its URL is told as a JSON line."""
    async with contextlib.AsyncExitStack() as stack:
        enter = stack.enter_async_context
        if options.serve == "router":
            names = {f"decode-{n}": url for n, url in enumerate(options.decode, 1)}
            routes = (await enter(Router.open(options.prefill, names))).routes()
        else:
            engine = await enter(aioflagcx.Engine(options.host, config=config))
            if options.serve == "prefill":
                routes = (await enter(PrefillServer.open(engine, options.blocks))).routes()
            else:
                routes = (await enter(DecodeServer.open(engine, options.blocks))).routes()
        url = await enter(web.serving(options.host, options.port, routes))
        other_process.tell({"url": url})
        await asyncio.Event().wait()


def summary(result: Result) -> dict[str, Any]:
    """The figures, as printed by ``--json``."""
    pairs = list(zip(result.requests, result.answers, strict=True))
    wrong = [answer for request, answer in pairs if not answer.is_right(request)]
    right = [answer for answer in result.answers if not answer.error]
    stats = result.stats
    decodes = [one["health"] for one in stats["decodes"].values() if one["health"]]
    ends: Counter[str] = sum((Counter(one["ends"]) for one in decodes), Counter())
    in_use = blocks_in_use(stats)
    return {
        "requests": len(pairs),
        "prompt_tokens": sum(len(request.prompt) for request in result.requests),
        "answer_tokens": sum(len(answer.tokens) for answer in result.answers),
        "kv_bytes": stats["prefill"]["bytes"] if stats["prefill"] else None,
        "paths": stats["prefill"]["paths"] if stats["prefill"] else None,
        "decodes": len(stats["decodes"]),
        "trouble": result.trouble,
        "retried": stats["retried"],
        "waited": stats["waited"],
        "hung_up": stats["hung_up"],
        "grants": {how: ends[how] for how in ("landed", "quiet", "fenced")},
        "seconds": result.seconds,
        "first_token_seconds": percentiles([answer.first_seconds for answer in right]),
        "answer_seconds": percentiles([answer.seconds for answer in right]),
        "errors": sorted({answer.error for answer in wrong if answer.error}),
        "wrong": len(wrong),
        "blocks_in_use": in_use,
        "verified": not wrong and not in_use,
    }


def percentiles(seconds: Sequence[float]) -> dict[str, float] | None:
    if not seconds:
        return None
    p50, p90, p99 = np.percentile(seconds, [50, 90, 99]).tolist()
    return {"p50": p50, "p90": p90, "p99": p99, "max": max(seconds)}


def print_summary(figures: dict[str, Any]) -> None:
    def times(name: str) -> str:
        shown = figures[name] or {}
        return ", ".join(f"{key} {seconds * 1e3:,.0f} ms" for key, seconds in shown.items())

    grants = figures["grants"]
    print(
        f"requests  {figures['requests']:,} of {figures['prompt_tokens']:,} prompt tokens, "
        f"{figures['answer_tokens']:,} tokens answered in {figures['seconds']:.2f} s\n"
        f"servers   router, prefill, {figures['decodes']} decodes; trouble: {figures['trouble']}\n"
        f"KV        {(figures['kv_bytes'] or 0) / MiB:,.0f} MiB written, "
        f"path {', '.join(figures['paths'] or ['unknown'])}\n"
        f"requests  {figures['waited']:,} waited for room, {figures['retried']:,} went on at "
        f"another decode, {figures['hung_up']:,} clients hung up\n"
        f"blocks    {grants['landed']:,} times all had landed, {grants['quiet']:,} times prefill "
        f"had stopped, {grants['fenced']:,} times it was fenced off\n"
        f"token 1   {times('first_token_seconds')}\n"
        f"answer    {times('answer_seconds')}"
    )
    if figures["verified"]:
        print("verified  every token, and the checksum of every cache; all blocks came back")
        return
    print(f"WRONG     {figures['wrong']:,} answers; {figures['blocks_in_use']:,} blocks kept")
    for error in figures["errors"]:
        print(f"          {error}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=positive, default=200, help="at once (%(default)s)")
    parser.add_argument("--hang-ups", type=int, default=20, help="more clients (%(default)s)")
    parser.add_argument("--decodes", type=positive, default=2, help="decode servers (%(default)s)")
    parser.add_argument(
        "--blocks", type=positive, default=256, help="of each server's KV cache (%(default)s)"
    )
    trouble = parser.add_mutually_exclusive_group()
    trouble.add_argument("--kill", action="store_true", help="kill a decode in the middle")
    trouble.add_argument("--stall", action="store_true", help="stop a decode for a while")
    parser.add_argument("--path", choices=SOFT_PATHS, help="the only one the soft device may use")
    parser.add_argument("--seed", type=int, default=1, help="of prompts and hang-ups")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--router", metavar="URL", help="send the requests there")
    parser.add_argument(
        "--serve", choices=["router", "prefill", "decode"], help="one server, until SIGTERM"
    )
    parser.add_argument("--host", default="127.0.0.1", help="our own address (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of --serve; 0 takes a free one")
    parser.add_argument("--prefill", metavar="URL", help="of --serve router")
    parser.add_argument("--decode", metavar="URL", nargs="+", help="of --serve router")
    parser.add_argument("--as-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if (options.kill or options.stall) and (options.router or options.decodes < 2):
        parser.error("--kill and --stall need two decodes or more, started here")
    if options.serve == "router" and not (options.prefill and options.decode):
        parser.error("--serve router needs --prefill and --decode")
    if options.blocks < MOST_BLOCKS:
        parser.error(f"--blocks: the longest request needs {MOST_BLOCKS}")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        config = Config.from_env()
        if options.path is not None:
            config = config.replace(soft_paths=(options.path,))
        if options.serve:
            work = serve(options, config)
            living = (
                other_process.while_parent_lives
                if options.as_child
                else other_process.until_terminated
            )
            aioflagcx.run(living(work))
            return 0
        load = measure(options, options.router, {}) if options.router else demo(options)
        result = aioflagcx.run(other_process.until_terminated(load))
    except (AioFlagcxError, aiohttp.ClientError, other_process.ChildFailed, OSError) as error:
        print(f"inference_router: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if result is None:
        return 128 + signal.SIGTERM
    figures = summary(result)
    if options.json:
        print(json.dumps(figures))
    else:
        print_summary(figures)
    return 0 if figures["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
