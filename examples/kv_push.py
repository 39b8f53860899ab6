"""A prefill process pushes a request's KV cache into a decode process's memory.

    python examples/kv_push.py                       # both processes on this machine
    python examples/kv_push.py --each                # by every way there is, one line each
    python examples/kv_push.py --path tcp --rounds 20
    python examples/kv_push.py --alloc               # decode's memory is Engine.alloc's
    python examples/kv_push.py --host 10.0.0.1 --decode-host 10.0.0.2 --via "ssh 10.0.0.2"

The decode process starts first. It allocates a paged KV cache, registers it, picks blocks for the
request and tells prefill its session id and block table, over its own channel: the example's is a
pipe. Prefill connects and writes every piece of the request, one block of one layer's K or V each,
from its own scattered blocks to decode's, in one `write`. The notification of that write tells
decode that the cache has landed; then decode computes by itself what each byte has to be, compares
all of its cache, and tells the result. The exit status is 0 only if every byte was right.

The first round is cold: nothing has touched the memory yet. Each round pushes other contents.

Needs tqdm: pip install "aioflagcx[examples]"
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import aioflagcx
import other_process
from aioflagcx.config import SOFT_PATHS, Config
from aioflagcx.errors import AioFlagcxError
from progress import Progress

BLOCK_TOKENS = 16
HEADS = 8
HEAD_DIM = 128
SPARE_BLOCKS = 0.25  # of the pool beyond the request: other requests' blocks, which must not change

GiB = 1 << 30

Cache = npt.NDArray[np.uint16]
"""[layer, K or V, block, token, head, dim]: bit patterns of bfloat16, which numpy does not have."""

Integers = npt.NDArray[np.int64]
"""A request's block table, its blocks in the pool in the order of its tokens; or addresses."""


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of the KV cache of one request, and of the pool of blocks that it is kept in."""

    layers: int
    tokens: int

    @property
    def blocks(self) -> int:
        """Blocks of the request, in each layer's K and V."""
        return self.tokens // BLOCK_TOKENS

    @property
    def pool(self) -> tuple[int, ...]:
        """Shape of the whole cache; each layer is registered as a region."""
        blocks = self.blocks + int(self.blocks * SPARE_BLOCKS)
        return (self.layers, 2, blocks, BLOCK_TOKENS, HEADS, HEAD_DIM)

    @property
    def block_bytes(self) -> int:
        return BLOCK_TOKENS * HEADS * HEAD_DIM * np.dtype(np.uint16).itemsize

    @property
    def pieces(self) -> int:
        return self.layers * 2 * self.blocks

    @property
    def nbytes(self) -> int:
        return self.pieces * self.block_bytes

    def random_table(self, seed: int, role: str) -> Integers:
        """Blocks for the request, picked from all over the pool."""
        rng = np.random.default_rng([seed, *role.encode()])
        return rng.permutation(self.pool[2])[: self.blocks]

    def addresses(self, layers: Sequence[int], table: Integers) -> Integers:
        """The address of each piece, given that of each layer; in the same order on both sides."""
        keys_and_values = np.arange(2)[:, None] * self.pool[2]
        offsets = (keys_and_values + table) * self.block_bytes
        pieces: Integers = np.array(layers)[:, None, None] + offsets
        return pieces.ravel()


def region_name(layer: int) -> str:
    return f"kv.layer.{layer}"


def plane(shape: Shape, seed: int, number: int, layer: int, which: int) -> Cache:
    """One layer's K or V in round ``number``, in the order of the tokens."""
    rng = np.random.Generator(np.random.Philox([seed, number, layer, which]))
    return rng.integers(0, 1 << 16, (shape.blocks, *shape.pool[3:]), dtype=np.uint16)


def fill(cache: Cache, table: Integers, shape: Shape, seed: int, number: int) -> None:
    """What the model does in prefill: the request's KV cache, block by block."""
    for layer, which in np.ndindex(cache.shape[:2]):
        cache[layer, which, table] = plane(shape, seed, number, layer, which)


def wrong_bytes(cache: Cache, table: Integers, shape: Shape, seed: int, number: int) -> int:
    """How many bytes differ from what they have to be after round ``number``.

    The request's blocks hold that round's contents, all others are still zero.
    """
    wrong = 0
    spare = np.setdiff1d(np.arange(shape.pool[2]), table)
    for layer, which in np.ndindex(cache.shape[:2]):
        got = cache[layer, which]
        wrong += differing_bytes(got[table], plane(shape, seed, number, layer, which))
        wrong += differing_bytes(got[spare], np.zeros_like(got[spare]))
    return wrong


def differing_bytes(got: Cache, expected: Cache) -> int:
    if np.array_equal(got, expected):
        return 0
    return int(np.count_nonzero(got.view(np.uint8) != expected.view(np.uint8)))


async def decode(shape: Shape, options: argparse.Namespace, config: Config) -> None:
    """The decode process: offers its memory, then checks it whenever a cache has landed."""
    seed = options.seed
    table = shape.random_table(seed, "decode")
    async with aioflagcx.Engine(options.decode_host, config=config) as engine:
        if options.alloc:  # a prefill process of this machine maps it
            pool = await engine.alloc(math.prod(shape.pool) * np.dtype(np.uint16).itemsize)
            cache: Cache = pool.numpy(np.uint16, shape.pool)
        else:
            cache = np.zeros(shape.pool, np.uint16)
        names = [region_name(layer) for layer in range(shape.layers)]
        await engine.register_many(list(cache), names=names)
        other_process.tell({"session": engine.session_id, "table": table.tolist()})
        async for notification in engine.notifications():
            if notification.name != "kv":
                continue
            number = json.loads(notification.payload)["round"]
            wrong = await asyncio.to_thread(wrong_bytes, cache, table, shape, seed, number)
            other_process.tell({"wrong_bytes": wrong})


@dataclasses.dataclass(frozen=True)
class Result:
    """What the pushes came to."""

    session: str
    path: str
    alloc: bool
    connect_seconds: float
    round_seconds: list[float]
    wrong_bytes: int


async def prefill(shape: Shape, seed: int, options: argparse.Namespace, config: Config) -> Result:
    """The prefill process: starts decode, pushes a cache a round, collects decode's verdicts."""
    async with (
        other_process.start("decode", decode_command(options)) as decoder,
        aioflagcx.Engine(options.host, config=config) as engine,
    ):
        cache = np.zeros(shape.pool, np.uint16)
        table = shape.random_table(seed, "prefill")
        regions = await engine.register_many(list(cache))

        offer = await decoder.hear()
        started = time.perf_counter()
        session = await engine.connect(offer["session"])
        connect_seconds = time.perf_counter() - started

        targets = [session.regions[region_name(layer)].addr for layer in range(shape.layers)]
        src = shape.addresses([region.addr for region in regions], table)
        dst = shape.addresses(targets, np.array(offer["table"]))

        round_seconds = []
        wrong = 0
        with Progress(options.rounds * shape.nbytes, "KV cache") as progress:
            for number in range(options.rounds):
                await asyncio.to_thread(fill, cache, table, shape, seed, number)
                landed = ("kv", json.dumps({"round": number}).encode())
                started = time.perf_counter()
                push = engine.submit_write(session, src, dst, shape.block_bytes, notify=landed)
                await progress.follow(push)
                round_seconds.append(time.perf_counter() - started)
                verdict = await decoder.hear()
                wrong += verdict["wrong_bytes"]
        return Result(
            session.id, session.path, options.alloc, connect_seconds, round_seconds, wrong
        )


def decode_command(options: argparse.Namespace) -> list[str]:
    """This script again, as decode; behind ``--via`` it may be on another machine."""
    command = [*shlex.split(options.via), sys.executable, __file__, "--role=decode"]
    for name in ("layers", "tokens", "seed", "path", "decode_host"):
        if (value := getattr(options, name)) is not None:
            command.append(f"--{name.replace('_', '-')}={value}")
    return command + ["--alloc"] * options.alloc


def summary(shape: Shape, result: Result) -> dict[str, Any]:
    """The figures, as printed by ``--json``."""

    def figures(seconds: float) -> dict[str, float]:
        return {"seconds": seconds, "gib_per_second": shape.nbytes / GiB / seconds}

    first, *following = result.round_seconds
    return {
        "layers": shape.layers,
        "tokens": shape.tokens,
        "bytes": shape.nbytes,
        "pieces": shape.pieces,
        "piece_bytes": shape.block_bytes,
        "session": result.session,
        "path": result.path,
        "alloc": result.alloc,
        "connect_seconds": result.connect_seconds,
        "rounds": len(result.round_seconds),
        "first": figures(first),
        "best": figures(min(following)) if following else None,
        "wrong_bytes": result.wrong_bytes,
        "verified": result.wrong_bytes == 0,
    }


def rate(figure: dict[str, float]) -> str:
    return f"{figure['seconds'] * 1e3:8.1f} ms  {figure['gib_per_second']:6.2f} GiB/s"


def print_shape(shape: Shape) -> None:
    print(
        f"KV cache  {shape.layers} layers, K and V, {HEADS} heads x {HEAD_DIM}, bfloat16, "
        f"{shape.tokens:,} tokens in {BLOCK_TOKENS}-token blocks\n"
        f"size      {shape.nbytes / (1 << 20):,.0f} MiB in {shape.pieces:,} pieces of "
        f"{shape.block_bytes / 1024:g} KiB, scattered by a random block table"
    )


def print_line(name: str, figures: dict[str, Any]) -> None:
    """One way among others."""
    wrong = figures["wrong_bytes"]
    best = figures["best"] or figures["first"]
    verdict = "every byte verified" if figures["verified"] else f"{wrong:,} bytes are WRONG"
    print(
        f"{name:<8}{rate(best)}, first {figures['first']['seconds'] * 1e3:.1f} ms, "
        f"connected in {figures['connect_seconds'] * 1e3:.1f} ms; {verdict}"
    )


def print_summary(shape: Shape, figures: dict[str, Any]) -> None:
    print_shape(shape)
    print(
        f"path      {figures['path']}, connected in {figures['connect_seconds'] * 1e3:.1f} ms\n"
        f"first   {rate(figures['first'])}, memory not touched before"
    )
    if figures["best"] is not None:
        print(f"best    {rate(figures['best'])}, of {figures['rounds'] - 1} more")
    if figures["verified"]:
        print("verified  every byte of every round, by the decode process")
    else:
        print(f"WRONG     {figures['wrong_bytes']:,} bytes are not what prefill pushed")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=positive, default=32, help="of the model (%(default)s)")
    parser.add_argument(
        "--tokens",
        type=positive,
        default=2048,
        help=f"of the request, a multiple of {BLOCK_TOKENS} (%(default)s)",
    )
    parser.add_argument("--rounds", type=positive, default=6, help="pushes (%(default)s)")
    parser.add_argument("--path", choices=SOFT_PATHS, help="the only one the soft device may use")
    parser.add_argument(
        "--alloc", action="store_true", help="decode's cache lies in memory of Engine.alloc"
    )
    parser.add_argument(
        "--each",
        action="store_true",
        help="local, local with --alloc, and TCP one after the other; both on this machine",
    )
    parser.add_argument("--seed", type=int, default=1, help="of contents and block tables")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--host", default="127.0.0.1", help="address of prefill (%(default)s)")
    parser.add_argument(
        "--decode-host", default="127.0.0.1", help="address of decode (%(default)s)"
    )
    parser.add_argument(
        "--via",
        default="",
        metavar="COMMAND",
        help='put before the command that starts decode, such as "ssh HOST"',
    )
    parser.add_argument("--role", choices=["decode"], help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.tokens % BLOCK_TOKENS:
        parser.error(f"--tokens must be a multiple of {BLOCK_TOKENS}")
    if options.each and (options.path is not None or options.alloc):
        parser.error("--each chooses --path and --alloc itself")
    return options


ONE = "one"


def ways(options: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The runs that ``options`` ask for, by name."""
    if not options.each:
        return {ONE: options}
    return {
        name: argparse.Namespace(**{**vars(options), "path": path, "alloc": alloc})
        for name, path, alloc in (
            ("local", "local", False),
            ("alloc", "local", True),
            ("tcp", "tcp", False),
        )
    }


def config_of(options: argparse.Namespace) -> Config:
    config = Config.from_env()
    return config if options.path is None else config.replace(soft_paths=(options.path,))


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    shape = Shape(options.layers, options.tokens)
    all_figures = {}
    try:
        if options.role == "decode":
            serving = decode(shape, options, config_of(options))
            aioflagcx.run(other_process.while_parent_lives(serving))
            return 0
        for name, way in ways(options).items():
            result = aioflagcx.run(prefill(shape, options.seed, way, config_of(way)))
            all_figures[name] = summary(shape, result)
    except (AioFlagcxError, other_process.ChildFailed, OSError) as error:
        print(f"kv_push: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not options.each:
        figures = all_figures[ONE]
        if options.json:
            print(json.dumps(figures))
        else:
            print_summary(shape, figures)
    elif options.json:
        print(json.dumps(all_figures))
    else:
        print_shape(shape)
        for name, figures in all_figures.items():
            print_line(name, figures)
    return 0 if all(figures["verified"] for figures in all_figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
