"""The examples, run as their users run them, and what they check with, on data with an error."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from example_programs import (
    EXAMPLES,
    children_of,
    ends_within,
    figures,
    on_terminal,
    read_until,
    run,
)

import aioflagcx
import async_server
import kv_push
import other_process
import pull_weights
from async_server import BLOCK_BYTES, BlockClient, BlockError, BlockServer

SCRIPTS = [
    "kv_push.py",
    "async_server.py",
    "pull_weights.py",
    "inference_router.py",
    "disaggregated_llm.py",
]
HOSTS = ["192.0.2.1", "192.0.2.2"]  # reserved for documentation and tests
SMALL_PUSH = ["--layers=3", "--tokens=256", "--rounds=2"]
ENDLESS_PUSH = ["--layers=1", "--tokens=256", "--rounds=1000000"]
SMALL_SERVICE = ["--demo", "--clients=3", "--requests=12", "--blocks=5", "--concurrency=4"]


@pytest.fixture
def two_hosts() -> Iterator[tuple[list[str], list[str]]]:
    """Two hosts, with the addresses HOSTS: what to put before a command to run it there."""
    ip = shutil.which("ip")
    if ip is None or os.geteuid() != 0:
        pytest.fail("network namespaces need root and iproute2")

    def configure(*words: str) -> None:
        subprocess.run([ip, *words], check=True)

    names = [f"aioflagcx-{os.getpid()}-{end}" for end in "ab"]
    with contextlib.ExitStack() as stack:
        for name in names:
            configure("netns", "add", name)
            stack.callback(configure, "netns", "del", name)
        peer = ["peer", "name", "eth0", "netns", names[1]]
        configure("link", "add", "eth0", "netns", names[0], "type", "veth", *peer)
        for name, address in zip(names, HOSTS, strict=True):
            configure("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            configure("-n", name, "link", "set", "eth0", "up")
        yield ([ip, "netns", "exec", names[0]], [ip, "netns", "exec", names[1]])


class TestAllExamples:
    @pytest.mark.parametrize("script", SCRIPTS)
    def test_help_says_what_an_example_shows(self, script: str) -> None:
        ended = run(script, "--help")
        assert ended.returncode == 0
        assert f"python examples/{script}" in ended.stdout

    @pytest.mark.parametrize("script", SCRIPTS)
    def test_a_configuration_error_is_told_without_a_traceback(
        self, script: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AIOFLAGCX_SPIN_US", "soon")
        ended = run(script, *(["--demo"] if script == "async_server.py" else []))
        assert ended.returncode == 1
        assert ended.stderr.startswith(f"{script.removesuffix('.py')}: AIOFLAGCX_SPIN_US")

    def test_progress_is_shown_on_a_terminal(self) -> None:
        with on_terminal("kv_push.py", *SMALL_PUSH) as (process, terminal):
            read_until(terminal, b"KV cache:")
            read_until(terminal, b"100%")
            assert process.wait(60) == 0

    @pytest.mark.parametrize(
        ("end", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
    )
    def test_no_child_outlives_the_example(self, end: signal.Signals, status: int) -> None:
        with on_terminal("kv_push.py", *ENDLESS_PUSH) as (process, terminal):
            read_until(terminal, b"KV cache:")
            with children_of(process) as children:
                assert children
                process.send_signal(end)
                assert process.wait(30) == status
                assert all(ends_within(child, 30) for child in children)

    def test_an_example_ends_with_an_error_when_its_child_is_killed(self) -> None:
        with on_terminal("kv_push.py", *ENDLESS_PUSH) as (process, terminal):
            read_until(terminal, b"KV cache:")
            with children_of(process) as children:
                for child in children:
                    signal.pidfd_send_signal(child, signal.SIGKILL)
                read_until(terminal, b"kv_push: ")
                assert process.wait(30) == 1


class TestKvPush:
    def test_the_demo_pushes_and_verifies_256_mib(self) -> None:
        result = figures("kv_push.py")
        assert (result["bytes"], result["pieces"]) == (256 << 20, 8192)
        assert (result["piece_bytes"], result["rounds"]) == (32 << 10, 6)
        for name in ("first", "best"):
            assert result[name]["gib_per_second"] == pytest.approx(
                0.25 / result[name]["seconds"], rel=1e-6
            )

    def test_it_prints_the_figures_and_nothing_else(self) -> None:
        ended = run("kv_push.py", *SMALL_PUSH)
        assert (ended.returncode, ended.stderr) == (0, "")
        for text in ("3 layers", "3 MiB in 96 pieces", "path", "GiB/s", "verified"):
            assert text in ended.stdout

    def test_the_path_can_be_chosen(self) -> None:
        assert figures("kv_push.py", *SMALL_PUSH, "--path=tcp")["path"] == "tcp"

    def test_each_way_has_its_line(self) -> None:
        ended = run("kv_push.py", *SMALL_PUSH, "--each")
        assert (ended.returncode, ended.stderr) == (0, "")
        lines = [line.split()[0] for line in ended.stdout.splitlines()]
        assert lines == ["KV", "size", "local", "alloc", "tcp"]
        assert ended.stdout.count("every byte verified") == 3

    def test_each_way_is_what_it_says(self) -> None:
        ended = run("kv_push.py", *SMALL_PUSH, "--each", "--json")
        ways = json.loads(ended.stdout)
        assert [(way["path"], way["alloc"]) for way in ways.values()] == [
            ("local", False),
            ("local", True),
            ("tcp", False),
        ]
        assert all(way["verified"] for way in ways.values())

    def test_each_way_leaves_no_choice(self) -> None:
        assert run("kv_push.py", "--each", "--path=tcp").returncode == 2

    def test_decode_can_be_started_through_another_command(self, tmp_path: Path) -> None:
        trace = tmp_path / "started"
        via = f"sh -c 'touch {trace}; exec \"$@\"' sh"
        figures("kv_push.py", *SMALL_PUSH, f"--via={via}")
        assert trace.exists()

    @pytest.mark.netns
    def test_prefill_and_decode_on_two_hosts(self, two_hosts: tuple[list[str], list[str]]) -> None:
        here, there = two_hosts
        command = [*here, sys.executable, str(EXAMPLES / "kv_push.py"), *SMALL_PUSH, "--json"]
        command += [f"--host={HOSTS[0]}", f"--decode-host={HOSTS[1]}", f"--via={shlex.join(there)}"]
        ended = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
        assert (ended.returncode, ended.stderr) == (0, "")
        result = json.loads(ended.stdout)
        assert result["verified"] is True
        assert result["session"].startswith(HOSTS[1])

    def test_a_single_round_has_no_best(self) -> None:
        assert figures("kv_push.py", *SMALL_PUSH[:2], "--rounds=1")["best"] is None

    def test_tokens_that_fill_no_block_are_refused(self) -> None:
        ended = run("kv_push.py", "--tokens=100")
        assert ended.returncode == 2
        assert "multiple of 16" in ended.stderr

    @pytest.mark.parametrize("where", ["request", "spare"])
    def test_one_wrong_byte_is_found(self, where: str) -> None:
        shape = kv_push.Shape(layers=2, tokens=128)
        cache = np.zeros(shape.pool, np.uint16)
        table = shape.random_table(1, "decode")
        kv_push.fill(cache, table, shape, seed=1, number=0)
        assert kv_push.wrong_bytes(cache, table, shape, seed=1, number=0) == 0

        spare = np.setdiff1d(np.arange(shape.pool[2]), table)
        block = table[-1] if where == "request" else spare[-1]
        cache[-1, -1, block, -1, -1, -1] ^= 0x0100
        assert kv_push.wrong_bytes(cache, table, shape, seed=1, number=0) == 1

    def test_an_earlier_round_does_not_pass_for_a_later_one(self) -> None:
        shape = kv_push.Shape(layers=1, tokens=128)
        cache = np.zeros(shape.pool, np.uint16)
        table = shape.random_table(1, "decode")
        kv_push.fill(cache, table, shape, seed=1, number=0)
        assert kv_push.wrong_bytes(cache, table, shape, seed=1, number=1) > shape.nbytes // 2

    def test_prefill_and_decode_address_the_pieces_in_the_same_order(self) -> None:
        shape = kv_push.Shape(layers=2, tokens=64)
        cache = np.arange(np.prod(shape.pool), dtype=np.uint16).reshape(shape.pool)
        table = shape.random_table(1, "prefill")
        layers = [layer.ctypes.data for layer in cache]
        addresses = iter(shape.addresses(layers, table) - cache.ctypes.data)
        for layer in range(2):
            for which in range(2):
                for block in table:
                    piece = cache[layer, which, block].ctypes.data - cache.ctypes.data
                    assert next(addresses) == piece
        assert next(addresses, None) is None

    def test_one_wrong_byte_makes_it_fail(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        fill = kv_push.fill

        def fill_with_an_error(
            cache: kv_push.Cache, table: kv_push.Integers, *rest: Any, **named: Any
        ) -> None:
            fill(cache, table, *rest, **named)
            cache[0, 1, table[3], 2, 1, 0] ^= 1

        monkeypatch.setattr(kv_push, "fill", fill_with_an_error)  # prefill runs in this process
        assert kv_push.main([*SMALL_PUSH, "--json"]) == 1
        result = json.loads(capsys.readouterr().out)
        assert (result["wrong_bytes"], result["verified"]) == (2, False)  # one in each round
        assert kv_push.main(SMALL_PUSH) == 1
        assert "WRONG" in capsys.readouterr().out


def parts_of(file: bytes) -> list[pull_weights.Part]:
    return pull_weights.parts(file[: pull_weights.header_size(file[:8], len(file))], len(file))


class TestPullWeights:
    def test_an_installed_checkpoint_is_pulled_and_verified(self, tmp_path: Path) -> None:
        copy = tmp_path / "copy.safetensors"
        result = figures("pull_weights.py", "--output", copy)
        assert result["bytes"] > 50 << 20
        published = safetensors.numpy.load_file(result["file"])
        pulled = safetensors.numpy.load_file(copy)
        assert pulled.keys() == published.keys()
        assert len(pulled) == result["tensors"]
        for name, tensor in pulled.items():
            np.testing.assert_array_equal(tensor, published[name])

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        tensors: dict[str, npt.NDArray[Any]] = {
            "matrix": np.arange(35, dtype=np.float32).reshape(5, 7),
            "nothing": np.zeros((0, 4), np.float16),
            "scalar": np.array(7, np.uint8),
            "odd": np.arange(13, dtype=np.int8),
        }
        file = tmp_path / "small.safetensors"
        safetensors.numpy.save_file(tensors, file, metadata={"origin": "a test"})
        return file

    def test_a_given_file_is_pulled_byte_by_byte(self, checkpoint: Path, tmp_path: Path) -> None:
        copy = tmp_path / "copy.safetensors"
        result = figures("pull_weights.py", checkpoint, "--output", copy, "--path=tcp")
        assert (result["tensors"], result["path"]) == (4, "tcp")
        assert copy.read_bytes() == checkpoint.read_bytes()

    def test_it_prints_the_figures_and_nothing_else(self, checkpoint: Path) -> None:
        ended = run("pull_weights.py", checkpoint)
        assert (ended.returncode, ended.stderr) == (0, "")
        for text in (str(checkpoint), "4 tensors", "GiB/s", "verified"):
            assert text in ended.stdout

    def test_one_wrong_byte_anywhere_is_found_in_its_tensor(self, checkpoint: Path) -> None:
        data = bytearray(checkpoint.read_bytes())
        listed = parts_of(bytes(data))
        assert sum(part.size for part in listed) == len(data)
        expected = pull_weights.digests(memoryview(data), listed)
        assert pull_weights.wrong_parts(memoryview(data), listed, expected) == []
        for part in listed:
            if part.size:
                data[part.offset + part.size - 1] ^= 0x80
                assert pull_weights.wrong_parts(memoryview(data), listed, expected) == [part.name]
                data[part.offset + part.size - 1] ^= 0x80

    def test_a_tensor_too_many_or_too_few_is_found(self, checkpoint: Path) -> None:
        data = checkpoint.read_bytes()
        listed = parts_of(bytes(data))
        expected = pull_weights.digests(memoryview(data), listed)
        wrong = pull_weights.wrong_parts(memoryview(data), listed[:-1], expected)
        assert wrong == [listed[-1].name]
        del expected["odd"]
        assert pull_weights.wrong_parts(memoryview(data), listed, expected) == ["odd"]

    def test_one_wrong_tensor_makes_it_fail(
        self,
        checkpoint: Path,
        monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:
        hear = other_process.Child.hear

        async def hear_of_another_matrix(self: other_process.Child) -> Any:
            offer = await hear(self)
            offer["sha256"]["matrix"] = offer["sha256"]["odd"]
            return offer

        monkeypatch.setattr(other_process.Child, "hear", hear_of_another_matrix)
        copy = checkpoint.with_name("copy")
        assert pull_weights.main([str(checkpoint), "--output", str(copy), "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["wrong"] == ["matrix"]
        assert not copy.exists()
        assert pull_weights.main([str(checkpoint)]) == 1
        assert "WRONG" in capsys.readouterr().out

    @pytest.mark.parametrize(
        "content",
        [
            b"",
            b"short",
            b"\xff" * 100,
            (2).to_bytes(8, "little") + b"[]",
            (2).to_bytes(8, "little") + b"{}" + b"left over",
            (7).to_bytes(8, "little") + b'{"a":1}',
            (27).to_bytes(8, "little") + b'{"a":{"data_offsets":[1,2]}}'[:27],
            (28).to_bytes(8, "little") + b'{"a":{"data_offsets":[1,2]}}' + b"xx",
            (28).to_bytes(8, "little") + b'{"a":{"data_offsets":[0,3]}}' + b"xx",
        ],
    )
    def test_a_file_of_another_format_is_refused(self, content: bytes, tmp_path: Path) -> None:
        file = tmp_path / "file"
        file.write_bytes(content)
        ended = run("pull_weights.py", file)
        assert ended.returncode == 1
        assert ended.stderr.startswith("pull_weights: ")
        assert "Traceback" not in ended.stderr

    def test_a_missing_file_is_told(self, tmp_path: Path) -> None:
        ended = run("pull_weights.py", tmp_path / "no.safetensors")
        assert ended.returncode == 1
        assert "No such file" in ended.stderr
        assert "Traceback" not in ended.stderr


class TestAsyncServer:
    def test_several_clients_get_what_they_asked_for_at_once(self) -> None:
        result = figures("async_server.py", *SMALL_SERVICE)
        assert (result["clients"], result["requests"], result["blocks"]) == (3, 36, 180)
        assert result["median_seconds"] <= result["p99_seconds"] <= result["seconds"]

    def test_it_prints_the_figures_and_nothing_else(self) -> None:
        ended = run("async_server.py", *SMALL_SERVICE, "--path=tcp")
        assert (ended.returncode, ended.stderr) == (0, "")
        for text in ("36 requests", "latency", "verified"):
            assert text in ended.stdout

    def test_server_and_client_run_by_hand(self) -> None:
        with subprocess.Popen(
            [sys.executable, EXAMPLES / "async_server.py", "--serve"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        ) as server:
            try:
                assert server.stdout is not None
                address = json.loads(server.stdout.readline())["address"]
                result = figures("async_server.py", "--client", address, "--requests=7")
                assert result["requests"] == 7
                server.terminate()
                assert server.wait(30) == 0
            finally:
                server.kill()

    def test_a_wrong_block_is_found(self) -> None:
        data = np.stack([async_server.block_contents(number) for number in (4, 9)])
        assert async_server.wrong_blocks(data, [4, 9]) == 0
        assert async_server.wrong_blocks(data, [4, 8]) == 1
        data[0, 17] ^= 1
        assert async_server.wrong_blocks(data, [4, 9]) == 1

    async def test_a_wrong_block_is_counted_by_the_client(self, service: Service) -> None:
        service.data[:, 5] ^= 1
        options = argparse.Namespace(
            client=service.address, host="127.0.0.1", seed=1, requests=3, blocks=2, concurrency=2
        )
        got = await async_server.fetch_many(options, aioflagcx.Config())
        assert (got.wrong_blocks, len(got.latencies)) == (6, 3)
        assert async_server.summary([got], options)["verified"] is False

    async def test_a_block_that_is_not_there_is_refused_and_the_client_goes_on(
        self, service: Service
    ) -> None:
        async with client_of(service.address) as (client, data, addresses):
            with pytest.raises(BlockError, match="no block 8"):
                await client.fetch([8], addresses[:1])
            with pytest.raises(BlockError):
                await client.fetch([1, 2], addresses[:1])
            with pytest.raises(BlockError, match="region"):
                await client.fetch([1], [4096])
            await client.fetch([3], addresses[:1])
            np.testing.assert_array_equal(data[0], service.data[3])

    async def test_addresses_may_be_reused_after_a_cancelled_fetch(self, service: Service) -> None:
        async with client_of(service.address) as (client, data, addresses):
            for _ in range(50):
                first = asyncio.create_task(client.fetch([1, 2], addresses))
                await asyncio.sleep(0)
                first.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await first
                data.fill(7)
                await client.fetch([3], addresses[:1])
                np.testing.assert_array_equal(data[0], service.data[3])
                assert (data[1] == 7).all()

    async def test_a_client_is_told_that_the_server_has_gone(self) -> None:
        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            async_server.send(writer, {"engine": "an engine", "blocks": 8})
            await reader.readline()
            writer.close()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        async with client_of(address_of(server)) as (client, _, addresses):
            with pytest.raises(ConnectionError):
                await client.fetch([1], addresses[:1])
            with pytest.raises(ConnectionError):
                await client.fetch([1], addresses[:1])
        server.close()

    async def test_the_server_lets_go_of_the_memory_of_a_client_that_has_gone(
        self, service: Service, silent_peer: SilentPeer
    ) -> None:
        _, writer = await ask(service, silent_peer)
        writer.close()
        await asyncio.wait_for(service.blocks.close(), 10)

    async def test_a_cancelled_request_is_answered_once_it_is_quiet(
        self, service: Service, silent_peer: SilentPeer
    ) -> None:
        reader, writer = await ask(service, silent_peer)
        async_server.send(writer, {"cancel": 1})
        reply = json.loads(await asyncio.wait_for(reader.readline(), 10))
        assert (reply["id"], reply["quiet"]) == (1, True)
        assert "cancelled" in reply["error"]
        writer.close()

    async def test_junk_costs_a_client_its_own_connection_only(self, service: Service) -> None:
        host, port = service.address.split(":")
        async with client_of(service.address) as (client, data, addresses):
            for junk in (b"junk\n", b"[]\n", b"7\n", b"{}\n", b"x" * (2 << 20) + b"\n"):
                reader, writer = await asyncio.open_connection(host, int(port))
                await reader.readline()
                writer.write(junk)
                with contextlib.suppress(ConnectionResetError):
                    assert await reader.read() == b""
                writer.close()
            await client.fetch([6], addresses[:1])
            np.testing.assert_array_equal(data[0], service.data[6])


@dataclasses.dataclass
class Service:
    """A block server of this process, with 8 blocks."""

    blocks: BlockServer
    data: async_server.Bytes
    address: str


@pytest.fixture
async def service() -> AsyncIterator[Service]:
    data = np.stack([async_server.block_contents(number) for number in range(8)])
    config = aioflagcx.Config(connect_timeout=100, transfer_timeout=100)
    async with aioflagcx.Engine(config=config) as engine:
        blocks = BlockServer(engine, await engine.register(data, access="read"))
        limit = async_server.MAX_LINE
        server = await asyncio.start_server(blocks.accept, "127.0.0.1", 0, limit=limit)
        yield Service(blocks, data, address_of(server))
        server.close()
        await blocks.close()


def address_of(server: asyncio.Server) -> str:
    host, port = server.sockets[0].getsockname()
    return f"{host}:{port}"


@contextlib.asynccontextmanager
async def client_of(
    address: str,
) -> AsyncIterator[tuple[BlockClient, async_server.Bytes, list[int]]]:
    """A client of a block server, its memory for two blocks, and the addresses of these."""
    host, port = address.split(":")
    data = np.zeros((2, BLOCK_BYTES), np.uint8)
    async with aioflagcx.Engine() as engine:
        region = await engine.register(data)
        async with BlockClient.connect(engine, host, int(port)) as client:
            yield client, data, [region.at(0), region.at(BLOCK_BYTES)]


@dataclasses.dataclass
class SilentPeer:
    """Where engines connect to and get no answer."""

    session_id: str
    reached: asyncio.Event


@pytest.fixture
async def silent_peer() -> AsyncIterator[SilentPeer]:
    reached = asyncio.Event()
    writers = []

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        reached.set()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    yield SilentPeer(address_of(server), reached)
    server.close()
    for writer in writers:
        writer.close()


async def ask(
    service: Service, peer: SilentPeer
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which a block was asked for that will not be delivered."""
    host, port = service.address.split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    await reader.readline()
    request = {"id": 1, "session": peer.session_id, "blocks": [1], "addresses": [4096]}
    async_server.send(writer, request)
    await peer.reached.wait()
    return reader, writer
