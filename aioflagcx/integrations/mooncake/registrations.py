"""Memory that is registered by its address, and nothing but that."""

from __future__ import annotations

import threading

from ...errors import AioFlagcxError, RegistrationError
from ...region import Region
from ...sync import Engine
from ...topology import ANYWHERE, Topology

__all__ = ["Registrations"]


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
        """When this returns, no peer can reach the memory.

        Raises DeregisterTimeout when a transfer of ours or a stopped peer holds it: the memory must
        not be freed, and another call waits again.
        """
        region = self._regions.get(address)
        if region is None:
            raise RegistrationError("no memory is registered at this address", address=address)
        self._engine.deregister(region)
        with self._lock:
            if self._regions.get(address) is region:
                del self._regions[address]

    def remove_all(self, addresses: list[int]) -> None:
        """:meth:`remove` for each, also after one has failed; raises what the last failure was."""
        failure: AioFlagcxError | None = None
        for address in addresses:
            try:
                self.remove(address)
            except AioFlagcxError as error:
                failure = error
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
