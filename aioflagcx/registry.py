"""The regions of one engine: which there are, how often each was registered, how they go.

All methods belong to the event loop's thread; what waits for the kernel or for peers runs on
native threads.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import weakref
from collections.abc import Callable, Collection, Iterator, Sequence

import numpy as np

from . import _native
from .allocation import allocate, check_size
from .errors import DeregisterTimeout, EngineClosed, RegistrationError
from .memory import Memory, locate
from .region import ACCESS_BITS, Region, RegionState
from .threads import NativeThreads
from .topology import ANYWHERE, Topology

__all__ = ["Registry"]

_logger = logging.getLogger(__name__)

_stranded: list[object] = []
"""Owners of memory that a stopped peer may still touch; for good."""

_TURN = 128
"""Regions handled before the event loop gets its turn: a few microseconds each."""

_DRAIN_SLICE = 0.1
"""Seconds a thread waits for regions in use, before it looks which others have been revoked."""

_CLOSE_TIMEOUT = 1.0
"""Seconds that closing waits for peers to let go; the native core then takes it from them."""

_OF_GPU = 3
"""What :meth:`_native.TransferEngine.check_mapped` calls memory of a GPU."""

_MAX_NAME = 1024
"""Bytes of the longest region name, in UTF-8."""


class Registry:
    """Registers memory, counts who uses it, and deregisters it."""

    def __init__(
        self,
        native: _native.TransferEngine,
        threads: NativeThreads,
        changed: Callable[[], None],
        topology: Topology,
    ) -> None:
        self._native = native
        self._topology = topology
        self._device_names = list(native.devices)
        self._takes_device_memory = native.takes_device_memory
        self._threads = threads
        self._changed = changed
        self._by_range: dict[tuple[int, int], Region] = {}
        self._by_name: dict[str, Region] = {}
        self._draining: dict[int, Region] = {}
        self._gone: dict[Region, asyncio.Future[None]] = {}
        self._unheard: weakref.WeakSet[Region] = weakref.WeakSet()
        """Those whose deregistration somebody has waited for in vain; they may ask again."""
        self._drainer: asyncio.Task[None] | None = None
        self._busy = 0
        self._idle: asyncio.Future[None] | None = None
        self._closed = False

    async def register(
        self,
        memories: Sequence[object],
        names: Sequence[str | None] | None,
        access: str,
        location: str | None = None,
    ) -> list[Region]:
        """Register all of them or, when that fails or is cancelled, none."""
        _check_access(access)
        if location is not None:
            self._nearest(location)
        if names is not None and len(names) != len(memories):
            raise RegistrationError(f"{len(memories)} memories but {len(names)} names")
        with self._at_work():
            return await self._register(memories, names, access, location)

    def _nearest(self, location: str) -> int:
        """The devices next to ``location``, by the bits of their indices; 0: any."""
        try:
            near = self._topology.nearest(location, self._device_names)
        except ValueError as error:
            raise RegistrationError(str(error)) from None
        return sum(1 << self._device_names.index(name) for name in near)

    async def alloc(self, size: object, name: str | None, access: str, huge_pages: bool) -> Region:
        """Register memory made for it, which goes with the region and its last view."""
        _check_access(access)
        number = check_size(size)
        _check_name(name)
        if name is not None and name in self._by_name:  # before much memory is taken for nothing
            raise self._name_in_use(name)
        with self._at_work():
            allocation = await allocate(self._threads, number, huge_pages, self._check_open)
            [region] = await self._register([allocation], [name], access, None)
            return region

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        """While regions come about: closing waits for its end."""
        self._check_open()
        self._busy += 1
        try:
            yield
        finally:
            self._busy -= 1
            if self._idle is not None and not self._busy and not self._idle.done():
                self._idle.set_result(None)

    def _check_open(self) -> None:
        if self._closed:
            raise EngineClosed("the engine is closed, or was closed meanwhile")

    async def _register(
        self,
        memories: Sequence[object],
        names: Sequence[str | None] | None,
        access: str,
        location: str | None,
    ) -> list[Region]:
        regions: list[Region] = []
        new: list[Region] = []
        ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        try:
            for index, memory in enumerate(memories):
                if index % _TURN == _TURN - 1:
                    await asyncio.sleep(0)
                name = None if names is None else names[index]
                region = self._reserve(locate(memory), memory, access, name, location)
                regions.append(region)
                if region._count == 1:
                    region._ready = ready
                    new.append(region)
            if new:
                await self._threads.run(self._register_blocking, new, access)
                self._settle(new, ready)
            for region in regions:
                if region._ready is not None:  # another call is registering it
                    await asyncio.shield(region._ready)
            self._check_open()
        except BaseException:
            self._settle(new, ready)
            self._unreserve(regions)
            raise
        return regions

    def _reserve(
        self, memory: Memory, given: object, access: str, name: str | None, location: str | None
    ) -> Region:
        """Count one more use of the range; with the first, the region is to be registered."""
        self._check_open()
        _check_name(name)
        if memory.device is not None and not self._takes_device_memory:
            raise self._out_of_reach(memory.addr, memory.size, memory.device)
        if location is None:  # as its owner says, if that tells which GPU it is
            known = memory.device in self._topology.gpus
            location = memory.device if known and memory.device else ANYWHERE
        region = self._by_range.get((memory.addr, memory.size))
        if region is not None:
            if (region.access, region.name, region.location) != (access, name, location):
                raise RegistrationError(
                    f"the same memory is registered already as {region!r}: deregister it before "
                    f"registering it with access {access!r}, name {name!r} and location "
                    f"{location!r}",
                    address=memory.addr,
                )
        else:
            if name is not None and name in self._by_name:
                raise self._name_in_use(name)
            if memory.writable is False and access != "read":
                raise RegistrationError(
                    f"the memory is read-only, so peers cannot have access {access!r}: use "
                    'access "read"',
                    address=memory.addr,
                )
            region = Region(memory, access, name, location)
            self._by_range[memory.addr, memory.size] = region
            if name is not None:
                self._by_name[name] = region
        region._count += 1
        if region._count > 1:
            region._keep(given, memory.owner)
        return region

    def _out_of_reach(self, addr: int, size: int, device: str) -> RegistrationError:
        return RegistrationError(
            f"{addr:#x}+{size} is memory of a GPU ({device}), which only RDMA devices reach, and "
            f"this engine has {', '.join(self._device_names)}: register a copy in host memory, or "
            "use RDMA devices",
            address=addr,
        )

    def _name_in_use(self, name: str) -> RegistrationError:
        return RegistrationError(f"name {name!r} is in use for {self._by_name[name]!r}")

    def _settle(self, regions: list[Region], ready: asyncio.Future[None]) -> None:
        """The native core has registered these, or never will; tell who waits for them."""
        if not regions or ready.done():
            return
        for region in regions:
            region._ready = None
            if not region._id:
                region._state = RegionState.GONE
                region._let_go()
                self._forget(region)
        if regions[0]._id:
            ready.set_result(None)
            self._changed()
        else:
            ready.set_exception(
                RegistrationError("the call that was registering the same memory failed")
            )
            ready.exception()  # retrieved: often nobody waits

    def _register_blocking(self, regions: list[Region], access: str) -> None:
        """On a native thread. Sets the ids itself, as the caller may be cancelled meanwhile.

        Arrays go to the native core, not objects: those it would convert with the GIL held.
        """
        count = len(regions)
        addrs = np.fromiter((region.addr for region in regions), np.uint64, count)
        sizes = np.fromiter((region.size for region in regions), np.uint64, count)
        allowed = np.fromiter(
            (region._writable is not False for region in regions), np.bool_, count
        )
        mapped = self._native.check_mapped(addrs, sizes)
        usable = mapped >= (1 if access == "read" else 2)
        if not usable.all():
            index = int(np.argmin(usable))
            raise _unusable(regions[index], int(mapped[index]))
        of_gpu = mapped == _OF_GPU
        for index in np.flatnonzero(of_gpu).tolist():
            region = regions[index]
            region._device = region._device or "cuda"
            if not self._takes_device_memory:
                raise self._out_of_reach(region.addr, region.size, region._device)
        writable = (mapped >= 2) & allowed
        names = [region.name for region in regions]
        near = {place: self._nearest(place) for place in {region.location for region in regions}}
        nearest = np.fromiter((near[region.location] for region in regions), np.uint64, count)
        try:
            ids = self._native.register(addrs, sizes, ACCESS_BITS[access], writable, names, nearest)
        except _native.NativeError as error:
            raise RegistrationError(
                f"registration failed in {error.call}: {error.detail}", cause=error
            ) from error
        for region, number, may in zip(regions, ids.tolist(), writable.tolist(), strict=True):
            region._writable = may
            region._id = number
            region._state = RegionState.REGISTERED

    def _unreserve(self, regions: list[Region]) -> None:
        """Take back one use of each; what is then unused goes in the background."""
        unused = []
        for region in regions:
            region._count -= 1
            if not region._count and region._id:
                unused.append(region)
        if unused:
            self._drain(unused)

    async def deregister(self, region: Region, timeout: float | None) -> None:
        """Take back one use; with the last one, revoke it and wait until nobody can use it."""
        if self._by_range.get((region.addr, region.size)) is region:
            if region._state is RegionState.REGISTERING:
                raise RegistrationError(f"{region!r} is still being registered")
            region._count -= 1
            if region._count:
                return
            self._drain([region])
        elif self._draining.get(region._id) is not region:
            if region not in self._unheard:
                raise RegistrationError(f"{region!r} is not registered with this engine")
            self._unheard.discard(region)
            return
        gone = self._gone.get(region)
        if gone is None:
            gone = self._gone[region] = asyncio.get_running_loop().create_future()
        self._unheard.add(region)
        await asyncio.wait((gone,), timeout=timeout)
        if gone.done():
            self._unheard.discard(region)
        else:
            raise DeregisterTimeout(
                f"{region!r} was still in use after {timeout} s, by a transfer of ours or by a "
                "peer that does not answer; it stays revoked, and its deregistration goes on in "
                "the background",
                address=region.addr,
            )

    def _forget(self, region: Region) -> None:
        """Its range and name are free to be used again."""
        if self._by_range.get((region.addr, region.size)) is region:
            del self._by_range[region.addr, region.size]
            if region.name is not None:
                del self._by_name[region.name]

    def _drain(self, regions: list[Region]) -> None:
        """Revoke, tell the peers, and deregister as soon as nobody uses them."""
        self._native.revoke([region._id for region in regions])
        for region in regions:
            self._forget(region)
            region._state = RegionState.DRAINING
            self._draining[region._id] = region
        self._changed()
        if self._drainer is None:
            self._drainer = asyncio.get_running_loop().create_task(self._drain_all())

    async def _drain_all(self) -> None:
        try:
            while self._draining:
                for number in await self._threads.run(self._drain_blocking, list(self._draining)):
                    self._end(self._draining.pop(number))
        finally:
            self._drainer = None

    def _drain_blocking(self, ids: list[int]) -> list[int]:
        """On a native thread: which of them are deregistered now."""
        if self._native.deregister(ids, _DRAIN_SLICE):
            return ids
        return [number for number in ids if self._native.deregister([number], 0.0)]

    def _end(self, region: Region) -> None:
        region._state = RegionState.GONE
        region._let_go()
        gone = self._gone.pop(region, None)
        if gone is not None and not gone.done():
            gone.set_result(None)

    async def close(self) -> None:
        """Deregister everything; what is still in use is left to the native core's close()."""
        self._closed = True
        while self._busy:
            self._idle = asyncio.get_running_loop().create_future()
            await self._idle
        if self._by_range:
            self._drain(list(self._by_range.values()))
        elif self._draining:
            self._drain([])
        drainer = self._drainer
        if drainer is not None:
            await asyncio.wait((drainer,), timeout=_CLOSE_TIMEOUT)
            drainer.cancel()
            await asyncio.wait((drainer,))

    def closed(self, in_use: Collection[int]) -> None:
        """The native core is closed, so nobody uses any region any more but those ``in_use``."""
        for region in [*self._by_range.values(), *self._draining.values()]:
            if region._id in in_use:
                _logger.error(
                    "a peer on this host was stopped while it copied, and may still touch %r: "
                    "this memory is kept until the process ends",
                    region,
                )
                _stranded.extend(region._owners())
            self._end(region)
        self._by_range.clear()
        self._by_name.clear()
        self._draining.clear()


def _unusable(region: Region, mapping: int) -> RegistrationError:
    if mapping == 0:
        words = f"{region.addr:#x}+{region.size} is not mapped as a whole in this process"
        if region._device is not None:
            words += f", and no memory of {region._device} that the CUDA driver knows"
        return RegistrationError(words, address=region.addr)
    return RegistrationError(
        f"{region.addr:#x}+{region.size} is mapped read-only, so peers cannot have "
        f'access {region.access!r}: use access "read"',
        address=region.addr,
    )


def _check_access(access: object) -> None:
    if not isinstance(access, str) or access not in ACCESS_BITS:
        raise RegistrationError(f"access {access!r} is none of {', '.join(ACCESS_BITS)}")


def _check_name(name: object) -> None:
    if name is None:
        return
    if not isinstance(name, str):
        raise RegistrationError(f"a region's name must be str or None, not {type(name).__name__}")
    try:
        size = len(name.encode())
    except UnicodeEncodeError as error:
        raise RegistrationError(f"name {name!r} cannot be encoded in UTF-8", cause=error) from None
    if not 0 < size <= _MAX_NAME:
        raise RegistrationError(f"a region's name has 1 to {_MAX_NAME} bytes in UTF-8, not {size}")
