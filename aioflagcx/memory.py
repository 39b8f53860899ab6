"""What a caller hands to ``register``, as address, size and who keeps it alive.

Pure: nothing here registers anything or looks at the process's mappings.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import numpy as np

from . import _dlpack
from .errors import RegistrationError

__all__ = ["Memory", "locate"]


class Memory(NamedTuple):
    """A contiguous range of this process's memory."""

    addr: int
    """First byte's address."""

    size: int
    """Bytes, at least 1."""

    writable: bool | None
    """Whether its owner lets others write it; None: nobody says, ask the mappings."""

    owner: object
    """What must live as long as the memory is used: it holds the object given, and its exported
    memory. None for a bare ``(addr, size)``."""

    device: str | None = None
    """Where its owner says that it is, when not in host memory: "cuda:3", or "cuda" for a GPU that
    is not named."""


def locate(memory: object) -> Memory:
    """Where ``memory`` is: ``(addr, size)``, or an object with the buffer protocol,
    ``__dlpack__``, ``__cuda_array_interface__`` or ``__array_interface__``, tried in this order.

    Raises :class:`~aioflagcx.errors.RegistrationError` for what is none of these, is empty,
    is not contiguous (naming its strides) or is neither in host memory nor in a CUDA device's.
    """
    if isinstance(memory, tuple):
        found = _from_pair(memory)
    elif (exported := _exported_buffer(memory)) is not None:
        found = _from_buffer(exported, memory)
    elif isinstance(memory, np.ndarray):
        found = _from_array_interface(memory)  # numpy's DLPack refuses the same element types
    elif hasattr(memory, "__dlpack__") and hasattr(memory, "__dlpack_device__"):
        found = _from_dlpack(memory)
    elif hasattr(memory, "__cuda_array_interface__"):
        found = _from_array_interface(memory, "__cuda_array_interface__")._replace(device="cuda")
    elif hasattr(memory, "__array_interface__"):
        found = _from_array_interface(memory)
    else:
        raise RegistrationError(
            f"{_name(memory)} is no memory: expected (addr, size), or an object with the buffer "
            "protocol, __dlpack__ or __array_interface__"
        )
    if found.size == 0:
        raise RegistrationError("memory of size 0 cannot be registered", address=found.addr)
    return found


def _name(memory: object) -> str:
    kind = type(memory)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _from_pair(pair: tuple[Any, ...]) -> Memory:
    try:
        addr, size = map(operator.index, pair)
    except (TypeError, ValueError):
        raise RegistrationError(
            f"a tuple must be (addr, size), two integers, not {pair!r:.80}"
        ) from None
    if addr <= 0 or size < 0 or addr + size > 2**64:
        raise RegistrationError(f"(addr, size) = ({addr:#x}, {size}) is no range of memory")
    return Memory(addr, size, None, None)


def _exported_buffer(memory: object) -> memoryview | None:
    """The object's buffer, or None when it exports none, or none that describes its elements."""
    try:
        return memoryview(memory)  # type: ignore[arg-type]
    except (TypeError, ValueError, BufferError):
        # numpy refuses element types that the protocol has no letter for, such as bfloat16.
        return None


def _from_buffer(buffer: memoryview, memory: object) -> Memory:
    if not _is_contiguous(buffer.shape or (), buffer.strides or (), buffer.itemsize):
        raise _not_contiguous(memory, buffer.shape, buffer.strides)
    if not buffer.nbytes:
        return Memory(0, 0, not buffer.readonly, buffer)
    # The export keeps others than an array from moving their memory, and holds the exporter.
    owner: object = buffer if buffer.obj is memory else (memory, buffer)
    if isinstance(memory, np.ndarray):
        owner = memory
    # As bytes where that can be, since numpy does not know every element format.
    flat = np.frombuffer(buffer, np.uint8) if buffer.c_contiguous else np.asarray(buffer)
    return Memory(_address(flat), buffer.nbytes, not buffer.readonly, owner)


def _address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def _from_dlpack(memory: Any) -> Memory:
    if getattr(memory, "requires_grad", False):
        raise RegistrationError(
            f"{_name(memory)} requires a gradient, which writing behind autograd's back would "
            "falsify: register its .detach()"
        )
    try:
        device, number = memory.__dlpack_device__()
        known = device in _dlpack.HOST_DEVICES or device == _dlpack.CUDA
        tensor = _dlpack.export(memory, device) if known else None
    except Exception as error:  # whatever its library raises
        raise RegistrationError(
            f"{_name(memory)} cannot be exported by DLPack", cause=error
        ) from error
    if tensor is None:
        raise RegistrationError(
            f"{_name(memory)} is on {_dlpack.device_name(device)}: no device here can reach it"
        )
    if tensor.copied:
        raise RegistrationError(f"{_name(memory)} exports a copy of itself, not its memory")
    if not _is_contiguous(tensor.shape, tensor.strides):
        raise _not_contiguous(memory, tensor.shape, tensor.strides, "elements")
    place = f"cuda:{number}" if device == _dlpack.CUDA else None
    owner = (memory, tensor.capsule)
    return Memory(tensor.addr, tensor.nbytes, not tensor.readonly, owner, place)


def _from_array_interface(memory: Any, attribute: str = "__array_interface__") -> Memory:
    interface = getattr(memory, attribute)
    data = interface.get("data")
    if not isinstance(data, tuple):
        raise RegistrationError(f"{_name(memory)}.{attribute} gives no address")
    try:
        addr, readonly = operator.index(data[0]), data[1]
        shape = tuple(map(operator.index, interface["shape"]))
        itemsize = np.dtype(interface["typestr"]).itemsize
    except (LookupError, TypeError, ValueError) as error:
        raise RegistrationError(f"{_name(memory)}.{attribute} is none", cause=error) from error
    strides = interface.get("strides")
    if strides is not None and not _is_contiguous(shape, tuple(strides), itemsize):
        raise _not_contiguous(memory, shape, tuple(strides))
    size = itemsize
    for extent in shape:
        size *= extent
    return Memory(addr, size, not readonly, memory)


def _is_contiguous(shape: tuple[int, ...], strides: tuple[int, ...], unit: int = 1) -> bool:
    """Whether elements of ``unit`` lie without gaps in some order of the axes."""
    if 0 in shape:
        return True
    axes = sorted((s, n) for n, s in zip(shape, strides, strict=True) if n != 1)
    for stride, extent in axes:
        if stride != unit:
            return False
        unit *= extent
    return True


def _not_contiguous(
    memory: object,
    shape: tuple[int, ...] | None,
    strides: tuple[int, ...] | None,
    unit: str = "bytes",
) -> RegistrationError:
    return RegistrationError(
        f"{_name(memory)} is not contiguous: shape {shape} with strides {strides} ({unit}); "
        "register a contiguous copy, or the whole memory it is a view of"
    )
