"""The runner, by its command line: what the command says is what comes back."""

from __future__ import annotations

import contextlib
import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from run_in_guest import NO_STATUS, TIMED_OUT

RUN = [sys.executable, str(Path(__file__).with_name("run_in_guest.py"))]
PATIENCE = 100  # seconds, for a boot on a busy machine

pytestmark = pytest.mark.timeout(2 * PATIENCE)


def qemu_of(runner: int) -> list[int]:
    """The QEMU that the process `runner` has started."""
    children = Path(f"/proc/{runner}/task/{runner}/children")
    with contextlib.suppress(OSError):
        for pid in map(int, children.read_text().split()):
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("qemu"):
                    return [pid]
    return []


@contextlib.contextmanager
def starting(folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A runner whose guest is about to boot, and the id of its QEMU."""
    command = [*RUN, "--", "sleep", "1000"]
    environment = {**os.environ, "TMPDIR": str(folder)}
    with subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) as runner:
        try:
            deadline = time.monotonic() + PATIENCE
            while not (found := qemu_of(runner.pid)):
                assert runner.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.01)
            yield runner, found[0]
        finally:
            runner.kill()


def wait_for_end(descriptor: int) -> None:
    """Until the process of a pidfd has ended."""
    ready, _, _ = select.select([descriptor], [], [], PATIENCE)
    assert ready


def test_status_output_and_files_come_back(tmp_path: Path) -> None:
    shared, keep = tmp_path / "a, b", tmp_path / "keep"
    script = (
        'set -e; pwd; echo "$VALUE $NAMED"; ls /sys/class/infiniband; echo result >"$1/result";'
        'echo lost >"$1/../lost"; tc qdisc add dev v0 root netem delay 1ms; echo error >&2;'
        'echo streamed; until [ -e "$1/go" ]; do sleep 0.1; done; exit 3'
    )
    options = ["--pairs", "2", "--writable", str(shared), "--env", "VALUE=a 'b'", "--env", "NAMED"]
    command = [*RUN, *options, "--", "bash", "-c", script, "bash", str(shared)]
    with subprocess.Popen(
        command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=tmp_path,
        env={**os.environ, "NAMED": "named", "RXE_KEEP": str(keep)},
    ) as runner:  # fmt: skip
        assert runner.stdout
        lines = []
        for line in runner.stdout:
            lines.append(line.strip())
            if line == "streamed\n":
                (shared / "go").touch()
        _, errors = runner.communicate(timeout=PATIENCE)
    devices = ["rxe0", "rxe1", "rxe2", "rxe3"]
    assert lines == [str(tmp_path), "a 'b' named", *devices, "streamed"], errors
    assert runner.returncode == 3
    assert "error\n" in errors
    assert (shared / "result").read_text() == "result\n"
    assert not (tmp_path / "lost").exists()
    (left,) = keep.iterdir()
    assert "rdma_rxe: loaded" in (left / "dmesg").read_text()


def test_a_guest_that_crashes_is_no_success(tmp_path: Path) -> None:
    command = [*RUN, "--", "bash", "-c", "echo c >/proc/sysrq-trigger"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == NO_STATUS
    assert "sysrq triggered crash" in done.stderr.lower()


def test_a_guest_that_takes_too_long_is_ended() -> None:
    command = [*RUN, "--timeout", "0.5", "--", "true"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    assert done.returncode == TIMED_OUT
    assert "did not end in time" in done.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_guest_does_not_outlive_its_runner(number: signal.Signals, tmp_path: Path) -> None:
    with starting(tmp_path) as (runner, qemu):
        descriptor = os.pidfd_open(qemu)
        try:
            runner.send_signal(number)
            assert runner.wait(PATIENCE) != 0
            wait_for_end(descriptor)
        finally:
            os.close(descriptor)
    if number != signal.SIGKILL:
        assert list(tmp_path.iterdir()) == []


def test_without_qemu_there_is_no_status(tmp_path: Path) -> None:
    for name in ("apt-cache", "apt-get", "busybox", "setpriv"):
        program = shutil.which(name)
        assert program
        (tmp_path / name).symlink_to(program)
    environment = {**os.environ, "PATH": str(tmp_path)}
    done = subprocess.run([*RUN, "--", "true"], capture_output=True, text=True, env=environment)
    assert done.returncode == NO_STATUS
    assert "failed to execute qemu-system-x86_64" in done.stderr


def test_a_shell_has_the_terminal() -> None:
    terminal, end = pty.openpty()
    with os.fdopen(terminal, "r+b", buffering=0) as screen:
        runner = subprocess.Popen([*RUN, "--shell"], stdin=end, stdout=end, stderr=end)
        os.close(end)
        screen.write(b"echo $((6 * 7)) $(tty); exit 5\n")
        seen = b""
        with contextlib.suppress(OSError):  # Linux has no other end of file of a terminal
            while data := screen.read(1 << 12):
                seen += data
        assert runner.wait(PATIENCE) == 5, seen
    assert b"42 /dev/hvc0" in seen
