"""inference_router.py, run as its users run it."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_programs import (
    EXAMPLES,
    children_of,
    ends_within,
    figures,
    on_terminal,
    read_until,
    run,
)

import inference_router
from inference import model

SCRIPT = "inference_router.py"
LONG = ["--requests=1000"]


def test_200_requests_at_once_are_answered_and_verified() -> None:
    result = figures(SCRIPT)
    assert (result["requests"], result["wrong"], result["blocks_in_use"]) == (200, 0, 0)
    assert result["waited"] > 0  # more than there is room for
    assert result["grants"]["landed"] >= 200
    assert result["kv_bytes"] > 200 * 64 * model.PLANES * model.TOKEN_BYTES
    for name in ("first_token_seconds", "answer_seconds"):
        times = result[name]
        assert 0 < times["p50"] <= times["p90"] <= times["p99"] <= times["max"]


def test_the_requests_of_a_killed_decode_are_answered_by_another() -> None:
    result = figures(SCRIPT, "--kill")
    assert (result["requests"], result["wrong"], result["blocks_in_use"]) == (200, 0, 0)
    assert "killed" in result["trouble"]
    assert result["retried"] > 0


def test_a_decode_that_stops_for_a_while_gives_its_requests_up_and_comes_back() -> None:
    result = figures(SCRIPT, "--stall", "--requests=100", "--path=tcp")
    assert (result["requests"], result["wrong"], result["blocks_in_use"]) == (100, 0, 0)
    assert "stopped" in result["trouble"]
    assert result["retried"] > 0


def test_it_prints_the_figures_and_nothing_else() -> None:
    ended = run(SCRIPT, "--requests=10", "--decodes=3", "--path=tcp")
    assert (ended.returncode, ended.stderr) == (0, "")
    for text in ("10 of", "3 decodes", "path tcp", "token 1", "verified"):
        assert text in ended.stdout


def test_a_wrong_answer_makes_it_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = model.answer

    def another_answer(prompt: list[int], count: int) -> tuple[list[int], str]:
        tokens, checksum = answer(prompt, count)
        return [*tokens[:-1], tokens[-1] ^ 1], checksum

    monkeypatch.setattr(model, "answer", another_answer)  # the servers are other processes
    assert inference_router.main(["--requests=3", "--hang-ups=0", "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["wrong"], result["errors"], result["verified"]) == (3, [], False)
    assert inference_router.main(["--requests=3", "--hang-ups=0"]) == 1
    assert "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--kill", "--decodes=1"],
        ["--kill", "--stall"],
        ["--stall", "--router=http://127.0.0.1:1"],
        ["--serve=router"],
        ["--blocks=1"],
        ["--requests=0"],
    ],
)
def test_what_cannot_be_is_refused(arguments: list[str]) -> None:
    ended = run(SCRIPT, *arguments)
    assert (ended.returncode, ended.stdout) == (2, "")


@pytest.mark.parametrize(
    ("end", "status"),
    [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)],
)
def test_no_server_outlives_the_example(end: signal.Signals, status: int) -> None:
    with on_terminal(SCRIPT, *LONG) as (process, terminal):
        wait_for_answers(terminal)
        with children_of(process) as children:
            assert len(children) == 4
            process.send_signal(end)
            assert process.wait(30) == status
            assert all(ends_within(child, 30) for child in children)


def test_a_stopped_server_does_not_outlive_it_either() -> None:
    with on_terminal(SCRIPT, *LONG) as (process, terminal):
        wait_for_answers(terminal)
        with children_of(process) as children:
            for child in children:
                signal.pidfd_send_signal(child, signal.SIGSTOP)
            process.kill()
            assert all(ends_within(child, 30) for child in children)


def test_it_ends_with_an_error_when_prefill_is_killed() -> None:
    with on_terminal(SCRIPT, *LONG) as (process, terminal):
        wait_for_answers(terminal)
        with children_of(process) as children:
            [prefill] = [child for child in children if b"--serve=prefill" in command_of(child)]
            signal.pidfd_send_signal(prefill, signal.SIGKILL)
        read_until(terminal, b"inference_router: the prefill process ended")
        assert process.wait(30) == 1


def wait_for_answers(terminal: int) -> None:
    """Until the progress bar has moved."""
    read_until(terminal, b" 0/1000")
    read_until(terminal, b"/1000")


def command_of(handle: int) -> bytes:
    """The command line of the process that a pidfd stands for."""
    info = Path(f"/proc/self/fdinfo/{handle}").read_text()
    [pid] = [line.split()[1] for line in info.splitlines() if line.startswith("Pid:")]
    return Path(f"/proc/{pid}/cmdline").read_bytes()


@contextlib.contextmanager
def server(*arguments: str) -> Iterator[str]:
    """A server started by hand; its URL."""
    with subprocess.Popen(
        [sys.executable, EXAMPLES / SCRIPT, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            yield json.loads(process.stdout.readline())["url"]
            process.terminate()
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_servers_run_by_hand() -> None:
    with (
        server("--serve=prefill") as prefill,
        server("--serve=decode") as one,
        server("--serve=decode") as other,
        server("--serve=router", f"--prefill={prefill}", "--decode", one, other) as router,
    ):
        result = figures(SCRIPT, f"--router={router}", "--requests=20")
        assert (result["requests"], result["decodes"]) == (20, 2)
