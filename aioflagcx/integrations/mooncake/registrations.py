"""Memory that is registered by its address, and nothing but that."""

from __future__ import annotations

import asyncio
import threading

from ...engine import Engine as AsyncEngine
from ...errors import AioFlagcxError, RegistrationError
from ...region import Region
from ...sync import Engine
from ...topology import ANYWHERE, Topology

__all__ = ["Registrations"]

_PATIENCE = 5.0
"""Seconds that memory which is still in use is waited for."""


class Registrations:
    """Which memory is registered at which address. All methods can be called on any thread."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._locations = frozenset(Topology.read().locations)
        self._lock = threading.Lock()
        """Guards `_regions`; not held while anything is waited for."""
        self._regions: dict[int, Region | None] = {}
        """By address; None while it is being registered."""

    def add(self, addresses: list[int], capacities: list[int], location: str) -> None:
        """Register all or none; RegistrationError and ValueError say why not.

        ``location`` is a hint, which other engines word differently: one that this host does not
        have is as good as none.
        """
        if len(addresses) != len(capacities):
            raise ValueError(f"{len(addresses)} addresses, but {len(capacities)} capacities")
        with self._lock:
            new: set[int] = set()
            for address in addresses:
                if address in self._regions or address in new:
                    # Not counted: unregistering has to mean that nobody can reach the memory, and
                    # what is at this address now need not be what it was when it was registered.
                    raise RegistrationError(
                        "memory is registered at this address already: unregister it first",
                        address=address,
                    )
                new.add(address)
            self._regions.update(dict.fromkeys(addresses))
        regions: list[Region] = []
        try:
            regions = self._engine.register_many(
                zip(addresses, capacities, strict=True),
                location=location if location in self._locations else ANYWHERE,
            )
        finally:
            with self._lock:
                for address in addresses:
                    del self._regions[address]
                self._regions.update((region.addr, region) for region in regions)

    def remove(self, address: int) -> None:
        """:meth:`remove_all` for one."""
        self.remove_all([address])

    def remove_all(self, addresses: list[int]) -> None:
        """When this returns, no peer can reach the memory at any of these addresses.

        What can be unregistered is, also when others cannot; raises what the last failure was. That
        is DeregisterTimeout when transfers of ours or a stopped peer hold some of it for over 5 s:
        it must not be freed, and another call waits again.
        """
        failure: AioFlagcxError | None = None
        regions: list[Region] = []
        seen: set[int] = set()
        for address in addresses:
            region = self._regions.get(address)
            if region is None or address in seen:
                failure = _unknown(address)
            else:
                regions.append(region)
            seen.add(address)
        loop, _ = self._engine._started()
        for region, error in loop.run(lambda: _deregister(self._engine._engine, regions)):
            if error is not None:
                failure = error
                continue
            with self._lock:
                if self._regions.get(region.addr) is region:
                    del self._regions[region.addr]
                else:  # another thread was here first
                    failure = _unknown(region.addr)
        if failure is not None:
            raise failure

    def find(self, address: int, length: int) -> memoryview | None:
        """Those bytes, if they lie in memory that was registered by one call."""
        with self._lock:
            regions = [region for region in self._regions.values() if region is not None]
        for region in regions:
            offset = address - region.addr
            if offset >= 0 and offset + length <= region.size:
                return region.view()[offset : offset + length]
        return None


async def _deregister(
    engine: AsyncEngine, regions: list[Region]
) -> list[tuple[Region, AioFlagcxError | None]]:
    """All of them at once; each with what it has failed with."""

    async def deregister(region: Region) -> AioFlagcxError | None:
        try:
            await engine.deregister(region, timeout=_PATIENCE)
        except AioFlagcxError as error:
            return error
        return None

    errors = await asyncio.gather(*map(deregister, regions))
    return list(zip(regions, errors, strict=True))


def _unknown(address: int) -> RegistrationError:
    return RegistrationError("no memory is registered at this address", address=address)
