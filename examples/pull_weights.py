"""One process publishes a model checkpoint, another pulls it by RDMA read and checks every tensor.

    python examples/pull_weights.py                            # a checkpoint found in a package
    python examples/pull_weights.py model.safetensors --output copy.safetensors
    python examples/pull_weights.py --path tcp --json

The publisher maps the file and registers the mapping, which nobody may write. Over its own
channel (the example's is a pipe) it tells its session id and the SHA-256 of each tensor; it takes
no part in what follows. The puller reads the file's header, allocates, and reads all tensors in
one call, straight from the publisher's page cache into its own memory. The exit status is 0 only
if every tensor has the hash that the publisher told.

Without a file, the largest .safetensors file of the installed Python packages is published.
Needs tqdm: pip install "aioflagcx[examples]"
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import hashlib
import importlib.metadata
import json
import mmap
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import aioflagcx
import other_process
from aioflagcx.config import SOFT_PATHS, Config
from aioflagcx.errors import AioFlagcxError
from progress import Progress

REGION = "checkpoint"
HEADER = "__metadata__"  # instead of a tensor's name: the one that no tensor can have
LENGTH_BYTES = 8  # of the little-endian integer at the start, the length of the header after it
MAX_HEADER = 100_000_000  # bytes; the limit of the reference implementation

GiB = 1 << 30


class BadCheckpoint(Exception):
    """A file is not in the safetensors format, or there is none."""


class Part(NamedTuple):
    """A tensor or the header, as a range of the file."""

    name: str
    offset: int
    size: int


def header_size(start: bytes, file_size: int) -> int:
    """The size of the header, its length included, from the first 8 bytes of the file."""
    size = LENGTH_BYTES + int.from_bytes(start, "little")
    if len(start) != LENGTH_BYTES or size > min(file_size, MAX_HEADER):
        raise BadCheckpoint("no safetensors file: its header would be longer than itself")
    return size


def parts(header: bytes, file_size: int) -> list[Part]:
    """The header and the tensors that it lists, in the order of the file, which they fill."""
    try:
        entries = json.loads(header[LENGTH_BYTES:])
        entries.pop(HEADER, None)
        ranges = sorted((*entry["data_offsets"], name) for name, entry in entries.items())
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise BadCheckpoint("no safetensors file: its header is not what it should be") from error
    found = [Part(HEADER, 0, len(header))]
    end = 0
    for begin, stop, name in ranges:
        if begin != end or stop < begin:
            raise BadCheckpoint(f"tensor {name!r} does not start where the one before it ends")
        found.append(Part(name, len(header) + begin, stop - begin))
        end = stop
    if len(header) + end != file_size:
        raise BadCheckpoint("the file's size is not that of its tensors")
    return found


def digests(data: memoryview, of: Sequence[Part]) -> dict[str, str]:
    """The SHA-256 of each part."""
    return {
        part.name: hashlib.sha256(data[part.offset : part.offset + part.size]).hexdigest()
        for part in of
    }


def wrong_parts(data: memoryview, of: Sequence[Part], expected: Mapping[str, str]) -> list[str]:
    """Names of the parts that are missing, too many, or of another hash than expected."""
    got = digests(data, of)
    return sorted(name for name in got.keys() | expected if got.get(name) != expected.get(name))


def installed_checkpoint() -> Path:
    """The largest .safetensors file that belongs to an installed Python package."""
    files = (
        Path(str(file.locate()))
        for distribution in importlib.metadata.distributions()
        for file in distribution.files or ()
        if file.suffix == ".safetensors"
    )
    found = [file for file in files if file.is_file()]
    if not found:
        raise BadCheckpoint("no installed Python package has a .safetensors file: name one")
    return max(found, key=lambda file: file.stat().st_size)


def mapped(file: Path) -> memoryview:
    """The whole file, as the kernel has it in its page cache."""
    if not file.stat().st_size:
        raise BadCheckpoint("the file is empty")
    with file.open("rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ))


async def publish(file: Path, config: Config) -> None:
    """The publishing process: registers the file, tells where it is, and waits for the end."""
    data = mapped(file)
    header = bytes(data[: header_size(bytes(data[:LENGTH_BYTES]), len(data))])
    hashes = await asyncio.to_thread(digests, data, parts(header, len(data)))
    async with aioflagcx.Engine(config=config) as engine:
        await engine.register(data, name=REGION, access="read")
        other_process.tell({"session": engine.session_id, "sha256": hashes})
        await asyncio.Event().wait()  # cancelled when the puller is done


@dataclasses.dataclass(frozen=True)
class Result:
    """What the pull came to."""

    data: memoryview
    parts: list[Part]
    path: str
    seconds: float
    wrong: list[str]


async def pull(options: argparse.Namespace, config: Config) -> Result:
    """The pulling process: starts the publisher, reads its checkpoint and checks the hashes."""
    async with (
        other_process.start("publisher", publish_command(options)) as publisher,
        aioflagcx.Engine(config=config) as engine,
    ):
        offer = await publisher.hear()
        session = await engine.connect(offer["session"])
        remote = session.regions[REGION]

        data = np.empty(remote.size, np.uint8).data
        local = await engine.register(data)
        await engine.read(session, local.addr, remote.addr, LENGTH_BYTES)
        size = header_size(bytes(data[:LENGTH_BYTES]), remote.size)
        await engine.read(session, local.addr, remote.addr, size)
        listed = parts(bytes(data[:size]), remote.size)

        tensors = listed[1:]
        offsets = np.array([tensor.offset for tensor in tensors], np.int64)
        lens = np.array([tensor.size for tensor in tensors], np.int64)
        with Progress(int(lens.sum()), options.file.name) as progress:
            started = time.perf_counter()
            reading = engine.submit_read(session, local.addr + offsets, remote.addr + offsets, lens)
            await progress.follow(reading)
            seconds = time.perf_counter() - started
        wrong = await asyncio.to_thread(wrong_parts, data, listed, offer["sha256"])
        return Result(data, listed, session.path, seconds, wrong)


def publish_command(options: argparse.Namespace) -> list[str]:
    """This script again, as the publisher."""
    command = [sys.executable, __file__, "--role=publish", str(options.file)]
    if options.path is not None:
        command.append(f"--path={options.path}")
    return command


def summary(file: Path, result: Result) -> dict[str, Any]:
    """The figures, as printed by ``--json``."""
    tensors = result.parts[1:]
    nbytes = sum(tensor.size for tensor in tensors)
    return {
        "file": str(file),
        "tensors": len(tensors),
        "bytes": nbytes,
        "path": result.path,
        "seconds": result.seconds,
        "gib_per_second": nbytes / GiB / result.seconds,
        "wrong": result.wrong,
        "verified": not result.wrong,
    }


def print_summary(figures: dict[str, Any]) -> None:
    print(
        f"file      {figures['file']}\n"
        f"size      {figures['bytes'] / (1 << 20):,.1f} MiB in {figures['tensors']:,} tensors\n"
        f"path      {figures['path']}\n"
        f"pulled    in {figures['seconds'] * 1e3:.1f} ms, {figures['gib_per_second']:.2f} GiB/s"
    )
    if figures["verified"]:
        print("verified  the SHA-256 of every tensor")
    else:
        print(f"WRONG     {', '.join(figures['wrong'])}")


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("file", type=Path, nargs="?", help="a .safetensors file to publish")
    parser.add_argument("--output", type=Path, metavar="FILE", help="keep what was pulled")
    parser.add_argument("--path", choices=SOFT_PATHS, help="the only one the soft device may use")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--role", choices=["publish"], help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse_arguments(arguments)
    try:
        config = Config.from_env()
        if options.path is not None:
            config = config.replace(soft_paths=(options.path,))
        if options.role == "publish":
            aioflagcx.run(other_process.while_parent_lives(publish(options.file, config)))
            return 0
        if options.file is None:
            options.file = installed_checkpoint()
        result = aioflagcx.run(pull(options, config))
        if options.output is not None and not result.wrong:
            options.output.write_bytes(result.data)
    except (AioFlagcxError, BadCheckpoint, other_process.ChildFailed, OSError) as error:
        print(f"pull_weights: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    figures = summary(options.file, result)
    if options.json:
        print(json.dumps(figures))
    else:
        print_summary(figures)
    return 0 if figures["verified"] else 1


if __name__ == "__main__":
    sys.exit(main())
