from __future__ import annotations

import array
import ctypes
import mmap
from typing import Any

import numpy as np
import pytest

from aioflagcx.errors import RegistrationError
from aioflagcx.memory import locate


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


class DLTensor(ctypes.Structure):
    """As in dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", DLTensor),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
new_capsule.restype = ctypes.py_object

BFLOAT = 4  # kDLBfloat


class Tensor:
    """Stands for a tensor of a library that exports its memory by DLPack alone."""

    def __init__(
        self,
        shape: tuple[int, ...],
        strides: tuple[int, ...] | None = None,
        *,
        device: int = 1,
        version: int = 0,
        flags: int = 0,
        offset: int = 0,
        requires_grad: bool = False,
    ) -> None:
        self.memory = np.zeros(4096, np.uint8)
        self.device = device
        self.version = version
        self.requires_grad = requires_grad
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = (ctypes.c_int64 * len(shape))(*strides) if strides else None
        tensor = DLTensor(
            data=address(self.memory),
            device_type=device,
            ndim=len(shape),
            code=BFLOAT,
            bits=16,
            lanes=1,
            shape=self._shape,
            strides=self._strides,
            byte_offset=offset,
        )
        self._managed = (
            Versioned(major=version, flags=flags, tensor=tensor)
            if version
            else Managed(tensor=tensor)
        )

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device, 0

    def __dlpack__(self, **arguments: object) -> Any:
        if "max_version" in arguments and not self.version:
            raise TypeError("unexpected keyword argument")
        self.options = arguments
        name = b"dltensor_versioned" if self.version else b"dltensor"
        return new_capsule(ctypes.addressof(self._managed), name, None)


def test_address_and_size() -> None:
    found = locate((0x1000, 64))
    assert found == (0x1000, 64, None, None, None)
    assert locate((np.int64(4096), np.uint32(64)))[:2] == (4096, 64)


@pytest.mark.parametrize(
    "pair", [(0, 8), (-1, 8), (1, -8), (2**64 - 4, 8), (1.5, 8), (1, 2, 3), ("a", 8), ()]
)
def test_a_tuple_that_is_no_range(pair: tuple[Any, ...]) -> None:
    with pytest.raises(RegistrationError):
        locate(pair)


@pytest.mark.parametrize(
    "memory",
    [
        bytearray(64),
        memoryview(bytearray(64)),
        array.array("d", [0.0] * 8),
        (ctypes.c_uint16 * 32)(),
        mmap.mmap(-1, 64),
        np.zeros((4, 4), np.float32),
        np.zeros((2, 4, 8), np.uint8, order="F"),
        np.zeros(8, "datetime64[s]"),  # no buffer, but an array interface
        np.zeros((4, 2, 4), np.uint16).transpose(2, 0, 1)[:],
    ],
    ids=lambda memory: type(memory).__name__,
)
def test_writable_buffers(memory: Any) -> None:
    found = locate(memory)
    assert found.size == 64
    assert found.writable is True
    ctypes.memset(found.addr, 0xFF, 64)
    assert bytes(np.asarray(memory).tobytes()) == b"\xff" * 64


def test_read_only_buffers_are_found_as_such() -> None:
    frozen = np.zeros(8)
    frozen.flags.writeable = False
    for memory in (b"12345678", frozen):
        assert locate(memory).writable is False


def test_a_bytearray_cannot_move_away_while_it_is_used() -> None:
    memory = bytearray(64)
    found = locate(memory)
    with pytest.raises(BufferError):
        memory.extend(bytes(1 << 20))
    assert found.owner is not None


@pytest.mark.parametrize(
    ("memory", "strides"),
    [
        (np.zeros((8, 8), np.uint8)[:, ::2], r"\(8, 2\)"),
        (np.zeros(8, np.int32)[::-1], r"\(-4,\)"),
        (np.broadcast_to(np.zeros(1, np.int64), (8,)), r"\(0,\)"),
        (Tensor((4, 4), (8, 1)), r"\(8, 1\)"),
    ],
)
def test_strided_memory_is_refused_naming_its_strides(memory: Any, strides: str) -> None:
    with pytest.raises(RegistrationError, match=strides):
        locate(memory)


@pytest.mark.parametrize(
    "memory",
    [b"", bytearray(), np.zeros((4, 0)), (0x1000, 0), Tensor((0, 4)), np.zeros((8, 8))[:0]],
)
def test_empty_memory_is_refused(memory: Any) -> None:
    with pytest.raises(RegistrationError, match="size 0"):
        locate(memory)


@pytest.mark.parametrize("version", [0, 1])
@pytest.mark.parametrize("strides", [None, (4, 1), (1, 3)])
@pytest.mark.parametrize("device", [1, 3])
def test_dlpack_of_a_type_numpy_does_not_know(
    version: int, strides: tuple[int, ...] | None, device: int
) -> None:
    tensor = Tensor((3, 4), strides, version=version, device=device, offset=32)
    found = locate(tensor)
    assert found.addr == address(tensor.memory) + 32
    assert found.size == 3 * 4 * 2
    assert found.writable is True
    assert tensor in found.owner  # type: ignore[operator]


def test_dlpack_flags() -> None:
    assert locate(Tensor((4,), version=1, flags=1)).writable is False
    with pytest.raises(RegistrationError, match="copy"):
        locate(Tensor((4,), version=1, flags=2))
    with pytest.raises(RegistrationError, match="DLPack"):
        locate(Tensor((4,), version=2))


@pytest.mark.parametrize("version", [0, 1])
def test_dlpack_memory_of_a_cuda_device(version: int) -> None:
    tensor = Tensor((3, 4), device=2, version=version, offset=32)
    found = locate(tensor)
    assert (found.addr, found.size) == (address(tensor.memory) + 32, 3 * 4 * 2)
    assert found.device == "cuda:0"
    assert tensor.options["stream"] == -1  # nothing is waited for
    host = Tensor((3, 4), version=version)
    assert locate(host).device is None
    assert "stream" not in host.options


@pytest.mark.parametrize(("device", "name"), [(10, "ROCm"), (13, "CUDA managed"), (99, "type 99")])
def test_other_devices_memory_is_refused_naming_it(device: int, name: str) -> None:
    with pytest.raises(RegistrationError, match=name):
        locate(Tensor((4,), device=device))


def test_a_tensor_that_requires_a_gradient_is_refused_with_the_remedy() -> None:
    with pytest.raises(RegistrationError, match="detach"):
        locate(Tensor((4,), requires_grad=True))


class Interface:
    def __init__(self, **interface: Any) -> None:
        self.__array_interface__ = interface


def test_array_interface() -> None:
    memory = np.zeros((4, 8), np.uint8)
    where = (address(memory), False)
    assert locate(Interface(shape=(4, 8), typestr="|u1", data=where)).size == 32
    assert locate(Interface(shape=(4, 8), typestr="|u1", data=where)).addr == where[0]
    assert locate(Interface(shape=(8, 4), typestr="|u1", data=where, strides=(1, 8))).size == 32
    assert locate(Interface(shape=(2,), typestr="<V8", data=(where[0], True))).writable is False
    with pytest.raises(RegistrationError, match=r"\(16, 1\)"):
        locate(Interface(shape=(2, 8), typestr="|u1", data=where, strides=(16, 1)))
    with pytest.raises(RegistrationError, match="address"):
        locate(Interface(shape=(2, 8), typestr="|u1", data=None))
    for wrong in ({"typestr": "zz"}, {"data": ("16", False)}, {"data": ()}, {"shape": "ab"}):
        with pytest.raises(RegistrationError, match="__array_interface__ is none"):
            locate(Interface(**{"shape": (4,), "typestr": "|u1", "data": where, **wrong}))
    with pytest.raises(RegistrationError, match="__array_interface__ is none"):
        locate(Interface(data=where))


def test_whatever_an_exporter_raises_is_a_registration_error() -> None:
    class Broken:
        def __dlpack_device__(self) -> tuple[int, int]:
            return 1, 0

        def __dlpack__(self, **_: object) -> object:
            raise AttributeError("broken")

    with pytest.raises(RegistrationError, match="AttributeError: broken"):
        locate(Broken())


class Cuda:
    def __init__(self, **interface: Any) -> None:
        self.__cuda_array_interface__ = interface


def test_cuda_array_interface() -> None:
    memory = Cuda(shape=(4, 2), typestr="<f4", data=(4096, True), strides=(4, 16))
    assert locate(memory) == (4096, 32, False, memory, "cuda")
    with pytest.raises(RegistrationError, match="not contiguous"):
        locate(Cuda(shape=(4, 2), typestr="<f4", data=(4096, False), strides=(16, 4)))
    with pytest.raises(RegistrationError, match="__cuda_array_interface__ is none"):
        locate(Cuda(data=(4096, False)))


@pytest.mark.parametrize("memory", [None, 4096, "text", [1, 2], object()])
def test_what_is_no_memory(memory: Any) -> None:
    with pytest.raises(RegistrationError, match="is no memory"):
        locate(memory)
