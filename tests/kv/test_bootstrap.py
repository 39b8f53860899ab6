"""The directory of rooms: what it knows and forgets, by HTTP, in-process and as a command."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web
from kv.servers import Server
from promises.measures import until

from aioflagcx import Engine
from aioflagcx.cli import main
from aioflagcx.errors import HandoverError
from aioflagcx.kv import bootstrap
from aioflagcx.kv import directory as questions
from aioflagcx.kv.bootstrap import Directory


class Clock:
    """Time as the test says."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(clock: Clock) -> Directory:
    return Directory(clock)


def test_a_room_is_found_once_all_its_ranks_are_there(directory: Directory) -> None:
    assert directory.find("r") == ([], [0])
    directory.register("r", 1, 2, "b:2", 10.0)
    assert directory.find("r") == ([], [0])
    directory.register("r", 0, 2, "a:1", 10.0)
    assert directory.find("r") == (["a:1", "b:2"], [])
    directory.remove("r", 1, "somebody:3")
    assert directory.find("r") == (["a:1", "b:2"], [])
    directory.remove("r", 1, "b:2")
    directory.remove("other", 1, "b:2")
    assert directory.find("r") == ([], [1])


def test_registrations_expire_unless_they_are_renewed(directory: Directory, clock: Clock) -> None:
    directory.register("r", 0, 1, "a:1", 10.0)
    directory.register("s", 0, 1, "a:1", 10.0)
    clock.now += 9
    directory.register("r", 0, 1, "a:1", 10.0)
    clock.now += 2
    assert directory.find("r") == (["a:1"], [])
    assert directory.find("s") == ([], [0])
    assert len(directory) == 1  # and takes no memory
    clock.now += 10
    assert len(directory) == 0


def test_a_room_with_another_number_of_ranks_begins_anew(directory: Directory) -> None:
    directory.register("r", 1, 2, "b:2", 10.0)
    directory.register("r", 0, 1, "c:3", 10.0)
    assert directory.find("r") == (["c:3"], [])


@pytest.mark.parametrize(
    ("room", "rank", "ranks", "session", "ttl"),
    [
        ("", 0, 1, "a:1", 1.0),
        ("r" * 1025, 0, 1, "a:1", 1.0),
        ("r", 1, 1, "a:1", 1.0),
        ("r", 0, 5000, "a:1", 1.0),
        ("r", 0, 1, "a", 1.0),
        ("r", 0, 1, "a:1", 0.0),
        ("r", 0, 1, "a:1", float("nan")),
        ("r", 0, 1, "a:1", 1e9),
    ],
)
def test_what_cannot_be_is_not_registered(
    directory: Directory, room: str, rank: int, ranks: int, session: str, ttl: float
) -> None:
    with pytest.raises(ValueError):
        directory.register(room, rank, ranks, session, ttl)
    assert len(directory) == 0


def test_a_full_directory_takes_no_more(
    directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bootstrap, "MOST_ROOMS", 1)
    directory.register("r", 0, 1, "a:1", 1.0)
    directory.register("r", 0, 1, "a:2", 1.0)
    with pytest.raises(OverflowError):
        directory.register("s", 0, 1, "a:1", 1.0)


async def test_who_waits_is_told_as_soon_as_the_last_rank_comes(directory: Directory) -> None:
    waiting = [asyncio.create_task(directory.wait("r", 20.0)) for _ in range(2)]
    await asyncio.sleep(0)
    directory.register("r", 0, 2, "a:1", 10.0)
    await asyncio.sleep(0)
    directory.register("r", 1, 2, "b:2", 10.0)
    assert [await one for one in waiting] == [(["a:1", "b:2"], [])] * 2
    assert await directory.wait("s", 0.01) == ([], [0])
    assert not directory._waiting


async def test_who_stops_waiting_is_forgotten(directory: Directory) -> None:
    waiting = asyncio.create_task(directory.wait("r", 20.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert not directory._waiting


async def test_a_directory_that_closes_answers_at_once(directory: Directory) -> None:
    waiting = asyncio.create_task(directory.wait("r", 3600.0))
    await asyncio.sleep(0)
    directory.close()
    assert await waiting == ([], [0])
    assert await directory.wait("r", 3600.0) == ([], [0])


@pytest_asyncio.fixture
async def address(directory: Directory) -> AsyncIterator[str]:
    """Of a directory that is served."""
    async with served(directory) as address:
        yield address


@contextlib.asynccontextmanager
async def served(directory: Directory, port: int = 0) -> AsyncIterator[str]:
    runner = web.AppRunner(bootstrap.app(directory))
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", port).start()
        yield f"127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def ask(method: str, url: str, body: Any = None) -> tuple[int, Any]:
    async with aiohttp.ClientSession() as http, http.request(method, url, json=body) as response:
        return response.status, await response.json() if response.status != 204 else None


async def test_the_http_interface_is_the_documented_one(address: str) -> None:
    url = f"http://{address}/rooms/a%2Fb"
    assert await ask("GET", url) == (404, {"missing": [0]})
    body = {"ranks": 2, "session": "h:1", "ttl": 5}
    assert await ask("PUT", f"{url}/0", body) == (204, None)
    assert await ask("GET", f"{url}?wait=0.01") == (404, {"missing": [1]})
    waiting = asyncio.create_task(ask("GET", f"{url}?wait=30"))
    await ask("PUT", f"{url}/1", {**body, "session": "h:2"})
    assert await waiting == (200, {"sessions": ["h:1", "h:2"]})
    assert await ask("GET", f"http://{address}/health") == (200, {"rooms": 1})
    assert await ask("DELETE", f"{url}/1?session=h:2") == (204, None)
    assert await ask("GET", url) == (404, {"missing": [1]})


@pytest.mark.parametrize(
    "body",
    [{}, [], "text", {"ranks": "2", "session": "h:1", "ttl": 5},
     {"ranks": 1, "session": 7, "ttl": 5}, {"ranks": 1, "session": "h", "ttl": 5},
     {"ranks": 1, "session": "h:1", "ttl": "5"}, {"ranks": True, "session": "h:1", "ttl": 5}],
)  # fmt: skip
async def test_bad_requests_are_told_so(address: str, body: Any) -> None:
    status, answer = await ask("PUT", f"http://{address}/rooms/r/0", body)
    assert status == 400
    assert answer["error"]
    assert await ask("GET", f"http://{address}/health") == (200, {"rooms": 0})


@pytest.mark.parametrize("seconds", ["x", "nan", "NaN", ""])
async def test_waiting_for_no_time_is_refused_and_harms_no_other(
    address: str, directory: Directory, seconds: str
) -> None:
    url = f"http://{address}/rooms/r"
    waiting = asyncio.create_task(ask("GET", f"{url}?wait=20"))
    await until(lambda: bool(directory._waiting))
    status, answer = await ask("GET", f"{url}?wait={seconds}")
    assert (status, answer) == (400, {"error": "wait must be a number of seconds"})
    assert await ask("GET", f"{url}?wait=0.01") == (404, {"missing": [0]})  # timers go on
    directory.register("r", 0, 1, "h:1", 5.0)
    assert await waiting == (200, {"sessions": ["h:1"]})


@pytest.mark.parametrize(
    ("data", "content_type", "status"),
    [(b"[" * 4000, "application/json", 400), (b"\xff", "application/json", 400),
     (b"{}", "application/json; charset=none", 400), (b"x" * 5000, "application/json", 413)],
)  # fmt: skip
async def test_garbage_is_the_sender_s_fault(
    address: str, data: bytes, content_type: str, status: int
) -> None:
    url, headers = f"http://{address}/rooms/r/0", {"Content-Type": content_type}
    async with (
        aiohttp.ClientSession() as http,
        http.put(url, data=data, headers=headers) as response,
    ):
        assert response.status == status


async def test_managers_find_each_other_by_the_directory(
    address: str, directory: Directory
) -> None:
    async with (
        Server.open("prefill", directory=address) as prefill,
        Server.open("decode", directory=f"http://{address}/") as decode,
    ):
        rooms = ("a/ b?", True), ("7", False), (".", True), ("..", False), ("%2e", True)
        for room, sender_first in rooms:
            receiver = decode.manager.receiver(room)
            starting = None
            if not sender_first:
                starting = asyncio.create_task(receiver.start([1, 2]))
                await until(lambda: bool(directory._waiting))
            sender = prefill.manager.sender(room)
            starting = starting or asyncio.create_task(receiver.start([1, 2]))
            await asyncio.gather(starting, sender.send([3, 4]))
            await receiver.done()
            assert (decode.cache[:, [1, 2]] == prefill.cache[:, [3, 4]]).all()
            decode.memory[:] = 0
        await until(lambda: len(directory) == 0)  # nobody looks for these any more


async def test_a_room_that_nobody_announces_is_waited_for_only_so_long(address: str) -> None:
    async with Server.open("decode", directory=address, bootstrap_timeout=0.2) as decode:
        with pytest.raises(HandoverError, match=r"prefill did not answer within 0\.2 s"):
            await decode.manager.receiver("r").start([0])


async def test_more_rooms_than_connections_take_turns(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(questions, "_CONNECTIONS", 3)
    monkeypatch.setattr(questions, "_TURN", 0.01)
    client = questions.DirectoryClient(address)
    client.open()
    waiting = [asyncio.create_task(client.find(f"queued {index}")) for index in range(9)]
    announced = asyncio.create_task(client.announce("r", 0, 1, "127.0.0.1:5", 30))
    assert await client.find("r") == ("127.0.0.1:5",)
    assert not any(task.done() for task in waiting)
    for task in (announced, *waiting):
        task.cancel()
    await asyncio.wait([announced, *waiting])
    await client.close()


async def test_a_directory_that_comes_late_is_waited_for(directory: Directory) -> None:
    async with served(Directory()) as address:
        pass
    async with (
        Server.open("prefill", directory=address) as prefill,
        Server.open("decode", directory=address) as decode,
    ):
        sending = asyncio.create_task(prefill.manager.sender("r").send([3]))
        receiver = decode.manager.receiver("r")
        starting = asyncio.create_task(receiver.start([1]))
        await asyncio.sleep(0)
        async with served(directory, int(address.rpartition(":")[2])):
            await asyncio.gather(starting, sending)
            await receiver.done()
            assert (decode.cache[:, 1] == prefill.cache[:, 3]).all()


async def test_a_prefill_that_has_died_is_not_asked_for_ever(
    address: str, directory: Directory
) -> None:
    """Its registration is there until it expires, and another one may come before that."""
    async with Engine() as engine:
        dead = engine.session_id
    directory.register("r", 0, 1, dead, 30.0)
    async with (
        Server.open("decode", directory=address) as decode,
        Server.open("prefill", directory=address) as prefill,
    ):
        receiver = decode.manager.receiver("r")
        starting = asyncio.create_task(receiver.start([1]))
        await until(lambda: dead in receiver._trouble)
        await prefill.manager.sender("r").send([3])
        await starting
        await receiver.done()


def leave_late(prefill: Server, monkeypatch: pytest.MonkeyPatch, other: asyncio.Event) -> None:
    """What it takes back at the directory arrives after `other`, if that comes at all."""
    client: Any = prefill.manager._directory
    ask = client._ask

    async def late(method: str, *rest: Any) -> Any:
        if method == "DELETE":
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(other.wait(), 0.2)
        answer = await ask(method, *rest)
        if method == "PUT":
            other.set()
        return answer

    monkeypatch.setattr(client, "_ask", late)


async def test_a_room_that_is_used_again_at_once_stays_announced(
    address: str, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What its first sender takes back is not what the second one says."""
    async with Server.open("prefill", directory=address) as prefill:
        first = prefill.manager.sender("r")
        await until(lambda: len(directory) == 1)
        again = asyncio.Event()
        leave_late(prefill, monkeypatch, again)
        await first.abort()
        prefill.manager.sender("r")
        await again.wait()
        await until(lambda: len(prefill.manager._announcements) == 1)
        assert directory.find("r") == ([prefill.manager.session_id], [])


async def test_closing_takes_announcements_back(
    address: str, directory: Directory, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with Server.open("prefill", directory=address) as prefill:
        for room in range(5):
            prefill.manager.sender(room)
        await until(lambda: len(directory) == 5)
        leave_late(prefill, monkeypatch, asyncio.Event())
    assert len(directory) == 0


async def test_what_is_no_directory_is_asked_again_now_and_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    asked: list[str] = []
    answers: list[Any] = [{}, {"sessions": 7}, {"sessions": ["no address"]}, [], {"sessions": [1]}]

    async def answer(request: web.Request) -> web.Response:
        asked.append(request.path)
        if len(asked) > len(answers):
            return web.json_response("what?", status=404)
        return web.json_response(answers[len(asked) - 1])

    application = web.Application()
    application.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(application)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    address = f"127.0.0.1:{runner.addresses[0][1]}"
    async with Server.open("decode", directory=address, bootstrap_timeout=2.0) as decode:
        with pytest.raises(HandoverError, match="prefill did not answer"):
            await decode.manager.receiver("r").start([0])
    await runner.cleanup()
    assert len(answers) < len(asked) < 20
    assert "is not what a directory says" in caplog.text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_serves_until_it_is_stopped(number: signal.Signals) -> None:
    command = [sys.executable, "-c", "from aioflagcx.cli import main; raise SystemExit(main())"]
    process = subprocess.Popen(
        [*command, "bootstrap", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    with process:
        assert process.stdout is not None and process.stderr is not None
        address = json.loads(process.stdout.readline())["address"]
        health = asyncio.run(ask("GET", f"http://{address}/health"))
        assert health == (200, {"rooms": 0})
        busy = subprocess.run(
            [*command, "bootstrap", "--port", address.rpartition(":")[2]],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert busy.returncode == 1
        assert busy.stderr.startswith("aioflagcx bootstrap: ")
        question = (f"GET /rooms/r?wait=60 HTTP/1.1\r\nHost: {address}\r\n\r\n").encode()
        host, _, port = address.rpartition(":")
        with socket.create_connection((host, int(port))) as asking:  # who asks does not keep it
            asking.sendall(question)
            process.send_signal(number)
            assert process.wait(20) == 0
        assert process.stderr.read() == b""


def test_without_aiohttp_it_is_said_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    for make in (
        bootstrap.app,
        lambda: Server.open("decode", directory="a:1").__aenter__().send(None),
    ):
        with pytest.raises(ImportError, match=r'pip install "aioflagcx\[kv\]"'):
            make()
    assert main(["bootstrap", "--port", "0"]) == 1
    assert 'pip install "aioflagcx[kv]"' in capsys.readouterr().err


def test_the_hand_over_alone_does_not_import_aiohttp() -> None:
    words = "import sys, aioflagcx.kv, aioflagcx.cli; raise SystemExit('aiohttp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", words], check=False).returncode == 0
