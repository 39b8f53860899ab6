from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Iterator
from typing import Any

import pytest


class Gpu:
    """The memory of the fake libcuda; the CPU cannot touch it at its addresses."""

    def __init__(self) -> None:
        try:
            self._cuda = ctypes.CDLL("libcuda.so.1")
            self._cuda.fake_cuda_alloc.restype = ctypes.c_ulonglong
        except (OSError, AttributeError):
            raise pytest.UsageError("run by tests/test_fake_rdma.py, with the fakes") from None

    def alloc(self, size: int) -> int:
        return int(self._cuda.fake_cuda_alloc(ctypes.c_size_t(size)))

    def store(self, address: int, content: bytes) -> None:
        self._cuda.fake_cuda_store(ctypes.c_ulonglong(address), content, len(content))

    def load(self, address: int, size: int) -> bytes:
        content = ctypes.create_string_buffer(size)
        self._cuda.fake_cuda_load(ctypes.c_ulonglong(address), content, size)
        return content.raw


class Nics:
    """The devices of the fake libibverbs, fake0 and fake1."""

    PORT_ACTIVE = 9
    PORT_ERROR = 10
    """Of enum ibv_event_type."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libibverbs.so.1")

    def report(self, device: int, event: int) -> None:
        """To the engine that has opened this device last."""
        self._library.fake_ibverbs_report(device, event)

    @contextlib.contextmanager
    def without_memory(self) -> Iterator[None]:
        """No registration succeeds meanwhile."""
        self._library.fake_ibverbs_fail_registrations(errno.ENOMEM)
        try:
            yield
        finally:
            self._library.fake_ibverbs_fail_registrations(0)


class GpuArray:
    """What cupy and numba make: memory of a GPU by its interface."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    return Gpu()


@pytest.fixture(scope="session")
def nics() -> Nics:
    return Nics()
