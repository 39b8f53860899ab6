"""An asyncio server that sends blocks on request, by RDMA write into its clients' memory.

    python examples/async_server.py --demo               # a server and four clients, all checked
    python examples/async_server.py --serve --port 9000
    python examples/async_server.py --client 127.0.0.1:9000 --requests 100

Clients ask over an ordinary connection, in JSON lines: which blocks, and the addresses in their
registered memory where each is to go. The server writes the blocks there. That they have landed
is told by the notification that goes with the write; a reply would have to be put in order with
the data. Replies tell failures, and whether the addresses are quiet: nothing can write there any
more. Until one or the other has come, a client must not use those addresses for anything else.

    server  {"engine": "6f0c...", "blocks": 1024}
    client  {"id": 1, "session": "127.0.0.1:40002", "blocks": [7, 19], "addresses": [8192, 4096]}
    client  {"cancel": 1}
    server  {"id": 1, "error": "there is no block 1900", "quiet": true}

A block's contents follow from its number, so clients check all they get.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import itertools
import json
import logging
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

import aioflagcx
import other_process
from aioflagcx.config import SOFT_PATHS, Config
from aioflagcx.errors import AioFlagcxError

BLOCKS = 1024
BLOCK_BYTES = 64 << 10
MAX_PENDING = 64  # requests of one client at a time; beyond it the server stops reading its lines
MAX_LINE = 1 << 20  # bytes; a request for 40,000 blocks
NOTIFICATION = "blocks"  # its payload is the request's id

FETCH_OPTIONS = ("requests", "blocks", "concurrency")  # that the demo hands on to its clients

GiB = 1 << 30

Bytes = npt.NDArray[np.uint8]

_logger = logging.getLogger("async_server")


def block_contents(number: int) -> Bytes:
    """What the server's block ``number`` holds."""
    rng = np.random.Generator(np.random.Philox(number))
    return rng.integers(0, 256, BLOCK_BYTES, dtype=np.uint8)


def send(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    """Send a line, unless the connection is gone, which its reader finds out."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


class BlockServer:
    """Serves the blocks of one region; the module's docstring has the protocol."""

    def __init__(self, engine: aioflagcx.Engine, region: aioflagcx.Region) -> None:
        self._engine = engine
        self._region = region
        self._blocks = region.size // BLOCK_BYTES
        self._clients: dict[asyncio.Task[None], asyncio.StreamWriter] = {}

    async def close(self) -> None:
        """Hang up on all clients; when it returns nothing is written to any of them."""
        for writer in self._clients.values():
            writer.close()
        if self._clients:
            await asyncio.wait(self._clients)

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve a client until it hangs up; what :func:`asyncio.start_server` calls."""
        task = asyncio.create_task(self._serve(reader, writer))
        self._clients[task] = writer
        task.add_done_callback(self._clients.pop)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        pending: dict[int, aioflagcx.Transfer] = {}
        answers: set[asyncio.Task[None]] = set()
        try:
            send(writer, {"engine": self._engine.engine_id, "blocks": self._blocks})
            while line := await reader.readline():
                message = json.loads(line)
                if "cancel" in message:
                    if message["cancel"] in pending:
                        pending[message["cancel"]].cancel()
                elif answer := self._start(message, pending, writer):
                    answers.add(answer)
                    answer.add_done_callback(answers.discard)
                await writer.drain()
        except (OSError, ValueError, KeyError, TypeError) as error:
            _logger.warning("hanging up on a client: %r", error)
        finally:
            # Nobody is left to be told, but the client's memory has to be left alone.
            for transfer in pending.values():
                transfer.cancel()
            if answers:
                await asyncio.wait(answers)
            writer.close()

    def _start(
        self,
        request: dict[str, Any],
        pending: dict[int, aioflagcx.Transfer],
        writer: asyncio.StreamWriter,
    ) -> asyncio.Task[None] | None:
        """Write the blocks of one request; a task that replies if that fails."""
        number = request["id"]
        try:
            if number in pending or len(pending) == MAX_PENDING:
                raise ValueError(f"the id is in use, or {MAX_PENDING} requests are")
            pending[number] = transfer = self._submit(request)
        except (AioFlagcxError, ValueError, TypeError, KeyError) as error:
            send(writer, {"id": number, "error": str(error), "quiet": True})
            return None

        async def answer() -> None:
            try:
                await transfer
            except AioFlagcxError as error:
                quiet = transfer.remote_quiet
                send(writer, {"id": number, "error": str(error), "quiet": quiet})
            finally:
                del pending[number]

        return asyncio.create_task(answer())

    def _submit(self, request: dict[str, Any]) -> aioflagcx.Transfer:
        for block in request["blocks"]:
            if not 0 <= block < self._blocks:
                raise ValueError(f"there is no block {block}")
        blocks = np.array(request["blocks"], np.int64)
        return self._engine.submit_write(
            request["session"],
            self._region.addr + blocks * BLOCK_BYTES,
            request["addresses"],
            BLOCK_BYTES,
            notify=(NOTIFICATION, str(request["id"]).encode()),
        )


class BlockError(Exception):
    """The server could not send the blocks of a request, and nothing is written any more."""


class BlockClient:
    """Gets blocks from one server, up to MAX_PENDING times at once; made by :meth:`connect`."""

    def __init__(
        self, engine: aioflagcx.Engine, writer: asyncio.StreamWriter, greeting: dict[str, Any]
    ) -> None:
        self._engine = engine
        self._writer = writer
        self._server_engine: str = greeting["engine"]
        self._numbers = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Exception | None]] = {}
        self._connected = True
        self.blocks: int = greeting["blocks"]
        """How many blocks the server has."""

    @classmethod
    @contextlib.asynccontextmanager
    async def connect(
        cls, engine: aioflagcx.Engine, host: str, port: int
    ) -> AsyncIterator[BlockClient]:
        """A client of the server at ``host`` and ``port``; it takes the engine's notifications."""
        reader, writer = await asyncio.open_connection(host, port, limit=MAX_LINE)
        try:
            greeting = await reader.readline()
            if not greeting:
                raise ConnectionResetError("the server hung up at once")
            client = cls(engine, writer, json.loads(greeting))
            listeners = [
                asyncio.create_task(client._hear_replies(reader)),
                asyncio.create_task(client._hear_notifications()),
            ]
            try:
                yield client
            finally:
                for listener in listeners:
                    listener.cancel()
                await asyncio.wait(listeners)
        finally:
            writer.close()

    async def fetch(self, blocks: Sequence[int], addresses: Sequence[int]) -> None:
        """Have ``blocks`` put at ``addresses`` of the engine's registered memory.

        Raises :class:`BlockError`. Then, and when it is cancelled, the addresses may be reused.

        Raises ConnectionError when the server is gone. It may still carry out what it was asked
        for, so the memory has to be deregistered before it is used for something else.
        """
        if not self._connected:
            raise ConnectionResetError("the server has hung up")
        number = next(self._numbers)
        answer = asyncio.get_running_loop().create_future()
        self._answers[number] = answer
        request = {
            "id": number,
            "session": self._engine.session_id,
            "blocks": blocks,
            "addresses": addresses,
        }
        try:
            send(self._writer, request)
            error = await asyncio.shield(answer)
        except asyncio.CancelledError:
            send(self._writer, {"cancel": number})
            await asyncio.wait([answer])  # the addresses are the server's until it answers
            raise
        finally:
            del self._answers[number]
        if error is not None:
            raise error

    async def _hear_notifications(self) -> None:
        async for notification in self._engine.notifications():
            if (notification.name, notification.engine_id) == (NOTIFICATION, self._server_engine):
                self._settle(int(notification.payload), None)

    async def _hear_replies(self, reader: asyncio.StreamReader) -> None:
        try:
            while line := await reader.readline():
                reply = json.loads(line)
                if not reply["quiet"]:
                    await self._engine.quiesce(self._server_engine)
                self._settle(reply["id"], BlockError(reply["error"]))
        finally:
            self._connected = False
            for number in self._answers:
                self._settle(number, ConnectionResetError("the server has hung up"))

    def _settle(self, number: int, error: Exception | None) -> None:
        answer = self._answers.get(number)
        if answer is not None and not answer.done():
            answer.set_result(error)


async def serve(host: str, port: int, config: Config) -> None:
    """Serve until SIGTERM or Ctrl-C; the address is told as a JSON line."""
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    data = np.concatenate([block_contents(number) for number in range(BLOCKS)])
    async with aioflagcx.Engine(host, config=config) as engine:
        blocks = BlockServer(engine, await engine.register(data, access="read"))
        server = await asyncio.start_server(blocks.accept, host, port, limit=MAX_LINE)
        try:
            bound_host, bound_port, *_ = server.sockets[0].getsockname()
            other_process.tell({"address": f"{bound_host}:{bound_port}"})
            await stop.wait()
        finally:
            server.close()
            await blocks.close()


@dataclasses.dataclass(frozen=True)
class Figures:
    """What one client's fetches came to."""

    started: float
    """By time.monotonic, which all processes of a machine share."""
    ended: float
    latencies: list[float]
    """Seconds of each fetch."""
    wrong_blocks: int


async def fetch_many(options: argparse.Namespace, config: Config) -> Figures:
    """The client mode: many fetches, several at a time, each checked."""
    host, _, port = options.client.rpartition(":")
    rng = np.random.default_rng(options.seed)
    slots, count = options.concurrency, options.blocks
    data = np.zeros((slots, count, BLOCK_BYTES), np.uint8)
    latencies = []
    wrong = 0
    async with aioflagcx.Engine(options.host, config=config) as engine:
        region = await engine.register(data)
        async with BlockClient.connect(engine, host.strip("[]"), int(port)) as client:
            requests = iter(rng.integers(client.blocks, size=(options.requests, count)).tolist())

            async def work(slot: int) -> None:
                nonlocal wrong
                mine = data[slot]
                start = slot * mine.nbytes
                addresses = [region.at(start + i * BLOCK_BYTES) for i in range(count)]
                for numbers in requests:  # the next ones that no other slot has taken
                    mine.fill(0)
                    asked = time.monotonic()
                    await client.fetch(numbers, addresses)
                    latencies.append(time.monotonic() - asked)
                    found = await asyncio.to_thread(wrong_blocks, mine, numbers)
                    wrong += found  # not in one line: the other slots add theirs meanwhile

            started = time.monotonic()
            await asyncio.gather(*map(work, range(slots)))
            return Figures(started, time.monotonic(), latencies, wrong)


def wrong_blocks(data: Bytes, numbers: Sequence[int]) -> int:
    """How many of the blocks in ``data`` do not hold what those ``numbers`` have to."""
    pairs = zip(data, numbers, strict=True)
    return sum(not np.array_equal(got, block_contents(number)) for got, number in pairs)


async def demo(options: argparse.Namespace) -> list[Figures]:
    """A server process and several client processes at once."""
    script = [sys.executable, __file__, "--as-child"]
    if options.path is not None:
        script.append(f"--path={options.path}")
    async with contextlib.AsyncExitStack() as stack:
        server = await stack.enter_async_context(
            other_process.start("server", [*script, "--serve"])
        )
        script.append(f"--client={(await server.hear())['address']}")
        script += [f"--{name}={getattr(options, name)}" for name in FETCH_OPTIONS]
        clients = []
        for seed in range(options.clients):
            starting = other_process.start("client", [*script, f"--seed={seed}"])
            clients.append(await stack.enter_async_context(starting))
        return [Figures(**await client.hear()) for client in clients]


def summary(clients: Sequence[Figures], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of all clients together, as printed by ``--json``."""
    latencies = [latency for client in clients for latency in client.latencies]
    median, p99 = np.percentile(latencies, [50, 99]).tolist()
    seconds = max(client.ended for client in clients) - min(client.started for client in clients)
    nbytes = len(latencies) * options.blocks * BLOCK_BYTES
    wrong = sum(client.wrong_blocks for client in clients)
    return {
        "clients": len(clients),
        "requests": len(latencies),
        "blocks": len(latencies) * options.blocks,
        "bytes": nbytes,
        "seconds": seconds,
        "gib_per_second": nbytes / GiB / seconds,
        "median_seconds": median,
        "p99_seconds": p99,
        "wrong_blocks": wrong,
        "verified": wrong == 0,
    }


def print_summary(figures: dict[str, Any]) -> None:
    print(
        f"clients   {figures['clients']}, {figures['requests']:,} requests in all\n"
        f"size      {figures['bytes'] / (1 << 20):,.0f} MiB in {figures['blocks']:,} blocks of "
        f"{BLOCK_BYTES // 1024} KiB\n"
        f"time      {figures['seconds']:.2f} s, the clients' checks included\n"
        f"latency   {figures['median_seconds'] * 1e3:.2f} ms median, "
        f"{figures['p99_seconds'] * 1e3:.2f} ms p99"
    )
    if figures["verified"]:
        print("verified  every block of every request, by the clients")
    else:
        print(f"WRONG     {figures['wrong_blocks']:,} blocks")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    mode = parser.add_mutually_exclusive_group(required=True)
    mode.add_argument("--demo", action="store_true", help="a server and clients on this machine")
    mode.add_argument("--serve", action="store_true", help="serve until Ctrl-C or SIGTERM")
    mode.add_argument("--client", metavar="HOST:PORT", help="fetch blocks from that server")
    parser.add_argument("--host", default="127.0.0.1", help="our own address (%(default)s)")
    parser.add_argument("--port", type=int, default=0, help="of --serve; 0 takes a free one")
    parser.add_argument("--clients", type=positive, default=4, help="of --demo (%(default)s)")
    parser.add_argument("--requests", type=positive, default=50, help="a client (%(default)s)")
    parser.add_argument("--blocks", type=positive, default=16, help="a request (%(default)s)")
    parser.add_argument(
        "--concurrency", type=positive, default=8, help="requests of a client at once (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of a client's choice of blocks")
    parser.add_argument("--path", choices=SOFT_PATHS, help="the only one the soft device may use")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--as-child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.concurrency > MAX_PENDING:
        parser.error(f"--concurrency: the server takes {MAX_PENDING} requests of a client at once")
    return options


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


async def run(options: argparse.Namespace, config: Config) -> list[Figures]:
    """What the options ask for; the figures of the clients that took part here."""
    if options.demo:
        return await demo(options)
    if options.serve:
        await serve(options.host, options.port, config)
        return []
    return [await fetch_many(options, config)]


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        config = Config.from_env()
        if options.path is not None:
            config = config.replace(soft_paths=(options.path,))
        work = run(options, config)
        clients = aioflagcx.run(
            other_process.while_parent_lives(work) if options.as_child else work
        )
    except (AioFlagcxError, BlockError, other_process.ChildFailed, OSError) as error:
        print(f"async_server: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if not clients:  # a server, or a child whose parent has gone
        return 0
    if options.as_child:
        other_process.tell(dataclasses.asdict(clients[0]))
        return 0
    figures = summary(clients, options)
    if options.json:
        print(json.dumps(figures))
    else:
        print_summary(figures)
    return 0 if figures["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
