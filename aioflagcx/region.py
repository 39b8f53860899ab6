"""Handles of registered memory, ours and a peer's."""

from __future__ import annotations

import asyncio
import ctypes
import enum
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ._native import ACCESS_REMOTE_READ, ACCESS_REMOTE_WRITE, RegionRecord
from .errors import RegistrationError
from .memory import Memory
from .topology import ANYWHERE

__all__ = ["ACCESS_BITS", "AnyRegion", "Region", "RegionState", "RemoteRegion"]

ACCESS_BITS = {
    "read": ACCESS_REMOTE_READ,
    "write": ACCESS_REMOTE_WRITE,
    "read_write": ACCESS_REMOTE_READ | ACCESS_REMOTE_WRITE,
}
"""What peers may do with a region, by the names the API uses."""

_ACCESS_NAMES = {bits: name for name, bits in ACCESS_BITS.items()}


class AnyRegion:
    """What :class:`Region` and :class:`RemoteRegion` have in common."""

    __slots__ = ("access", "addr", "name", "size")

    addr: int
    """Address of the first byte, in its own process."""

    size: int
    """Length in bytes."""

    name: str | None
    """Unique among its engine's regions; None when it was registered without."""

    access: str
    """What peers may do: "read", "write" or "read_write"."""

    def at(self, offset: int) -> int:
        """The address ``offset`` bytes into the region; IndexError outside 0 <= offset < size."""
        offset = operator.index(offset)
        if not 0 <= offset < self.size:
            raise IndexError(f"offset {offset} is outside {self!r}")
        return self.addr + offset

    def _words(self) -> str:
        name = "" if self.name is None else f"{self.name!r} "
        return f"{name}{self.addr:#x}+{self.size} {self.access}"


class RegionState(enum.Enum):
    """The life of a :class:`Region`; it only moves forward."""

    REGISTERING = "registering"
    REGISTERED = "registered"
    DRAINING = "deregistering"  # revoked: no new use, the old ones are waited for
    GONE = "deregistered"


class Region(AnyRegion):
    """Memory of this process registered with an engine: by :meth:`Engine.register` or
    :meth:`Engine.alloc`.

    Its memory's owner is kept alive until :meth:`Engine.deregister` has finished, and beyond that
    by each view. All views are of the memory itself: :meth:`view`, :meth:`numpy`, and what array
    libraries make of a region by DLPack. Memory of a GPU has no views.
    """

    __slots__ = (
        "__weakref__",
        "_count",
        "_device",
        "_id",
        "_more_owners",
        "_owner",
        "_ready",
        "_state",
        "_writable",
        "location",
    )

    location: str
    """What it is next to: "cuda:3", "cpu:0", or "*" when that is not known."""

    def __init__(
        self, memory: Memory, access: str, name: str | None, location: str = ANYWHERE
    ) -> None:
        self.addr = memory.addr
        self.size = memory.size
        self.name = name
        self.access = access
        self._id = 0
        self._state = RegionState.REGISTERING
        self._count = 0
        self._writable = memory.writable
        self._device = memory.device  # of a GPU; None for memory that the CPU can touch
        self.location = location
        self._ready: asyncio.Future[None] | None = None  # while it is being registered
        # One object for most regions: the garbage collector looks at each that there is.
        self._owner = memory.owner
        self._more_owners: dict[int, object] | None = None  # of the same memory given again, by id

    def view(self) -> memoryview:
        """The region's bytes, read-only when the memory is; keeps the region's memory alive,
        also after the region was deregistered and its engine closed.

        Raises :class:`~aioflagcx.errors.RegistrationError` after the region was deregistered, and
        for memory of a GPU.
        """
        if self._state is not RegionState.REGISTERED:
            raise RegistrationError(f"{self!r} is not registered", address=self.addr)
        if self._device is not None:
            raise RegistrationError(
                f"{self!r} is memory of a GPU, which has no view: use what it was registered from",
                address=self.addr,
            )
        array = (ctypes.c_ubyte * self.size).from_address(self.addr)
        array._owners = self._owners()  # type: ignore[attr-defined]
        view = memoryview(array).cast("B")
        return view if self._writable else view.toreadonly()

    def numpy(
        self, dtype: npt.DTypeLike = "uint8", shape: int | Sequence[int] | None = None
    ) -> npt.NDArray[Any]:
        """:meth:`view` as an array of ``dtype``, of one dimension unless ``shape`` says otherwise.

        One extent of the shape may be -1. Raises ValueError when the region's bytes are not as
        many as dtype and shape need, or the dtype's elements are Python objects.
        """
        kind = np.dtype(dtype)
        if kind.hasobject or not kind.itemsize:
            raise ValueError(f"dtype {kind} does not lie in plain memory")
        count, rest = divmod(self.size, kind.itemsize)
        if rest:
            raise ValueError(
                f"{self!r}: {self.size} bytes are no whole number of elements of dtype {kind}, "
                f"{kind.itemsize} bytes each"
            )
        array = np.frombuffer(self.view(), kind)
        try:
            return array if shape is None else array.reshape(shape)
        except ValueError:
            raise ValueError(
                f"{self!r}: {count} elements of dtype {kind} do not have shape {shape}"
            ) from None

    def __dlpack__(self, **options: Any) -> Any:
        """The bytes as a DLPack capsule, for ``torch.from_dlpack(region)`` and its like."""
        return self.numpy().__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.numpy().__dlpack_device__()

    def _keep(self, given: object, owner: object) -> None:
        """One more owner of the same memory; by identity, as an object may be given often."""
        if owner is not None:
            if self._more_owners is None:
                self._more_owners = {}
            self._more_owners.setdefault(id(given), owner)  # it holds what was given

    def _owners(self) -> tuple[object, ...]:
        return (self._owner, *(self._more_owners or {}).values())

    def _let_go(self) -> None:
        self._owner = self._more_owners = None

    def __repr__(self) -> str:
        state = "" if self._state is RegionState.REGISTERED else f" {self._state.value}"
        return f"<Region {self._words()}{state}>"


class RemoteRegion(AnyRegion):
    """Memory of a peer, as its MR table has it; found through a :class:`Session`."""

    __slots__ = ("_id", "_peer")

    def __init__(self, record: RegionRecord, peer: str) -> None:
        self.addr = record.addr
        self.size = record.size
        self.name = record.name
        self.access = _ACCESS_NAMES.get(record.access, f"unknown ({record.access:#x})")
        self._id = record.id
        self._peer = peer

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RemoteRegion):
            return NotImplemented
        return self._peer == other._peer and self._id == other._id and self.addr == other.addr

    def __hash__(self) -> int:
        return hash((self._peer, self._id))

    def __repr__(self) -> str:
        return f"<RemoteRegion {self._words()} of {self._peer}>"
