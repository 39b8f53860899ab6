"""Bandwidth and latency between two RDMA devices of this machine, as perftest measures them."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

__all__ = ["bandwidth", "latency"]


def bandwidth(
    program: str, device: str, target: str, size: int, count: int, timeout: float = 100.0
) -> float:
    """MiB/s of `count` requests of `size` bytes from `device` to `target`, posted side by side.

    `program` is "ib_write_bw" or "ib_read_bw". Raises RuntimeError with what it printed if it fails
    or takes more than `timeout` seconds.
    """
    # Without --noPeak the clock is read for each request, which may take longer than the request.
    words = _run((program, "--noPeak"), device, target, size, count, timeout)
    return float(words[3])  # bytes, iterations, peak, average, message rate


def latency(
    program: str, device: str, target: str, size: int, count: int, timeout: float = 100.0
) -> float:
    """Microseconds of one of `count` requests at the median, one after the other.

    `program` is "ib_write_lat", whose two ends write to each other by turns and look at their
    memory for it, or "ib_read_lat". Raises as `bandwidth` does.
    """
    words = _run((program,), device, target, size, count, timeout)
    return float(words[4])  # bytes, iterations, minimum, maximum, typical, and others


def _run(
    program: tuple[str, ...], device: str, target: str, size: int, count: int, timeout: float
) -> list[str]:
    """The words of the last line of figures."""
    port = _free_port()
    run = (*program, "-F", "--port", str(port), "--size", str(size), "--iters", str(count))
    with _started(*run, *_on(target)) as server:
        _wait_until_it_listens(port, server, timeout)
        with _started(*run, *_on(device), "127.0.0.1") as client:
            output = _output(client, timeout)
        _output(server, timeout)
    (line,) = [words for words in map(str.split, output.splitlines()) if words[:1] == [str(size)]]
    return line


def _on(device: str) -> tuple[str, str, str, str]:
    return "--ib-dev", device, "--gid-index", str(_gid_index(device))


def _gid_index(device: str) -> int:
    """The first GID that is an IPv4 address."""
    for path in sorted(Path(f"/sys/class/infiniband/{device}/ports/1").glob("gids/*")):
        if ipaddress.IPv6Address(path.read_text().strip()).ipv4_mapped:
            return int(path.name)
    raise RuntimeError(f"there is no device {device} with a GID of an IPv4 address")


def _free_port() -> int:
    """For the connection by which the two processes agree."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


@contextlib.contextmanager
def _started(*command: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    with process:
        try:
            yield process
        finally:
            process.kill()


def _wait_until_it_listens(port: int, server: subprocess.Popen[str], timeout: float) -> None:
    """Without trying: it accepts a single connection."""
    deadline = time.monotonic() + timeout
    while not _listens(port):
        if server.poll() is not None or time.monotonic() > deadline:
            server.kill()
            raise RuntimeError(f"{server.args!r} does not listen: {server.communicate()[0]}")
        time.sleep(0.01)


def _listens(port: int) -> bool:
    lines = (line.split() for line in Path("/proc/net/tcp").read_text().splitlines())
    return any(line[1].endswith(f":{port:04X}") and line[3] == "0A" for line in lines)


def _output(process: subprocess.Popen[str], timeout: float) -> str:
    try:
        output, _ = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        process.kill()
        output, _ = process.communicate()
        raise RuntimeError(f"{process.args!r} did not end in {timeout} s: {output}") from None
    if process.returncode != 0:
        raise RuntimeError(f"{process.args!r}: exit status {process.returncode}: {output}")
    return output
