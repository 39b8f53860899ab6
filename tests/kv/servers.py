"""A server with a KV cache, in this process or in another one."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import numpy.typing as npt
from promises.host import Host
from promises.measures import until

from aioflagcx import Config, Engine
from aioflagcx.errors import HandoverError
from aioflagcx.kv import CacheGroup, CacheLayout, KVManager, KVPoll, KVReceiver, KVSender

Bytes = npt.NDArray[np.uint8]

LAYERS, BLOCKS, BLOCK = 3, 32, 256


def group_of(memory: Bytes, layers: int = LAYERS, blocks: int = BLOCKS) -> CacheGroup:
    """A cache that fills the memory."""
    size = memory.nbytes // layers
    bases = tuple((memory.ctypes.data + layer * size,) for layer in range(layers))
    return CacheGroup(bases, blocks, size // blocks)


def blocks_of(memory: Bytes, layers: int = LAYERS, blocks: int = BLOCKS) -> Bytes:
    """As [layer, block, byte]."""
    return memory.reshape(layers, blocks, -1)


@dataclasses.dataclass
class Server:
    """A manager and its cache, on the test's own loop."""

    manager: KVManager
    memory: Bytes

    @property
    def cache(self) -> Bytes:
        return blocks_of(self.memory)

    @classmethod
    @contextlib.asynccontextmanager
    async def open(
        cls, role: Any, memory: Bytes | None = None, path: str = "process", **options: Any
    ) -> AsyncIterator[Server]:
        if memory is None:
            memory = np.zeros(LAYERS * BLOCKS * BLOCK, np.uint8)
            if role == "prefill":
                memory[:] = np.random.default_rng(1).integers(1, 256, memory.size, np.uint8)
        options.setdefault("layout", CacheLayout((group_of(memory),)))
        if "engine" not in options:
            options["config"] = Config(soft_paths=(path,), transfer_timeout=20.0)
        async with KVManager(role, **options) as manager:
            yield cls(manager, memory)


async def handed_over(
    prefill: KVManager, decode: KVManager, room: str | int, src: Any, dst: Any
) -> tuple[KVSender, KVReceiver]:
    """One whole request."""
    sender, receiver = prefill.sender(room), decode.receiver(room, prefill.session_id)
    await asyncio.gather(receiver.start(dst), sender.send(src))
    await receiver.done()
    assert (sender.poll(), receiver.poll()) == (KVPoll.Success, KVPoll.Success)
    return sender, receiver


def is_goodbye_lost(error: BaseException) -> bool:
    """Whether TCP has thrown the peer's last words away, as it does when the peer closes while
    something it has not read yet is on its way: then nobody knows that it was a fence."""
    return isinstance(error, HandoverError) and "reset by peer" in str(error)


# What a Host does that is another process's; `host.kv` and `host.rooms` are made by open_manager.


async def open_manager(host: Host, role: Any, layers: int, blocks: int, options: Any) -> None:
    state: Any = host
    layout = CacheLayout((group_of(host.memory, layers, blocks),))
    state.kv = KVManager(role, layout, engine=host.engine, **options)
    state.rooms = {}
    await state.kv.start()


async def close_manager(host: Host) -> None:
    state: Any = host
    await state.kv.close()


async def open_sender(host: Host, room: str) -> None:
    state: Any = host
    state.rooms[room] = state.kv.sender(room)


async def open_receiver(host: Host, room: str, prefill: str) -> None:
    state: Any = host
    state.rooms[room] = state.kv.receiver(room, prefill)


async def call(host: Host, room: str, method: str, *arguments: Any) -> Any:
    """A method of the room's half."""
    state: Any = host
    return await getattr(state.rooms[room], method)(*arguments)


async def send(host: Host, room: str, blocks: Any, last: bool = True, aux: bytes = b"") -> None:
    state: Any = host
    await state.rooms[room].send(blocks, last=last, aux=aux)


async def send_and_abort(host: Host, room: str, blocks: Any, reason: str) -> None:
    """Give the room up once something has been written, if that can be seen before all has."""
    state: Any = host
    sender = state.rooms[room]
    sending = asyncio.ensure_future(sender.send(blocks))
    targets = sender._targets.values()
    await until(
        lambda: sending.done() or any(one.bytes_done for to in targets for one in to.transfers)
    )
    await sender.abort(reason)
    await sending


async def poll(host: Host, room: str) -> KVPoll:
    state: Any = host
    found: KVPoll = state.rooms[room].poll()
    return found


async def engine_of(config: Config) -> Engine:
    engine = Engine(config=config)
    await engine.start()
    return engine
