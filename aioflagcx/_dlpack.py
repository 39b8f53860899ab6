"""Reads a DLPack capsule with ctypes: array libraries refuse element types they do not know,
such as bfloat16 in numpy, and only where the bytes lie matters here.

Structures and constants are those of dlpack.h, versions 0.8 and 1.x.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

__all__ = ["CUDA", "HOST_DEVICES", "Tensor", "device_name", "export"]

_CPU = 1
_CUDA_HOST = 3
_ROCM_HOST = 11

HOST_DEVICES = frozenset({_CPU, _CUDA_HOST, _ROCM_HOST})
"""Device types whose memory a CPU can address: plain and page-locked host memory."""

CUDA = 2
"""The device type of GPU memory that the CUDA driver can export."""

_DEVICE_NAMES = {2: "CUDA", 7: "Vulkan", 8: "Metal", 10: "ROCm", 13: "CUDA managed memory"}

_READ_ONLY = 1  # DLPACK_FLAG_BITMASK_READ_ONLY
_IS_COPIED = 2  # DLPACK_FLAG_BITMASK_IS_COPIED


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("type_code", ctypes.c_uint8),
        ("type_bits", ctypes.c_uint8),
        ("type_lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    _fields_ = (
        ("dl_tensor", _DLTensor),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _DLManagedTensorVersioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("dl_tensor", _DLTensor),
    )


_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.argtypes = (ctypes.py_object, ctypes.c_char_p)
_is_valid.restype = ctypes.c_int
_get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_get_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)
_get_pointer.restype = ctypes.c_void_p


class Tensor(NamedTuple):
    """Where a tensor's elements lie; valid while ``capsule`` lives."""

    addr: int
    nbytes: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # in elements
    readonly: bool
    copied: bool
    capsule: object


def device_name(device_type: int) -> str:
    """A DLDeviceType in words."""
    return _DEVICE_NAMES.get(int(device_type), f"DLPack device type {int(device_type)}")


def export(exporter: Any, device_type: int = _CPU) -> Tensor:
    """The memory of ``exporter``, an object with ``__dlpack__`` on a device of that type.

    Nothing waits for what the device is still doing with it.
    The capsule is not consumed, so its destructor gives the tensor back to its library.
    Raises what ``__dlpack__`` raises, and ValueError for a capsule of an unknown kind.
    """
    options = {"stream": -1} if device_type == CUDA else {}
    try:
        capsule = exporter.__dlpack__(max_version=(1, 0), **options)
    except TypeError:  # older than DLPack 1.0
        capsule = exporter.__dlpack__(**options)
    flags = 0
    if _is_valid(capsule, b"dltensor_versioned"):
        versioned = _DLManagedTensorVersioned.from_address(
            _get_pointer(capsule, b"dltensor_versioned")
        )
        if versioned.major != 1:
            raise ValueError(f"DLPack version {versioned.major}.{versioned.minor} is not known")
        flags = versioned.flags
        tensor = versioned.dl_tensor
    elif _is_valid(capsule, b"dltensor"):
        tensor = _DLManagedTensor.from_address(_get_pointer(capsule, b"dltensor")).dl_tensor
    else:
        raise ValueError(f"__dlpack__ returned {type(capsule).__name__}, not a DLPack capsule")
    shape = tuple(tensor.shape[: tensor.ndim])
    count = 1
    for extent in shape:
        count *= extent
    return Tensor(
        addr=(tensor.data or 0) + tensor.byte_offset,
        nbytes=(count * tensor.type_bits * tensor.type_lanes + 7) // 8,
        shape=shape,
        strides=tuple(tensor.strides[: tensor.ndim]) if tensor.strides else _row_major(shape),
        readonly=bool(flags & _READ_ONLY),
        copied=bool(flags & _IS_COPIED),
        capsule=capsule,
    )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that dlpack.h lets an exporter leave out."""
    strides = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= extent
    return tuple(reversed(strides))
