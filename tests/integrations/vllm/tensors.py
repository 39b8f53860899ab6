"""Arrays as KV caches: PyTorch's tensors if ``TEST_TORCH`` is set, as `make test-llm` does.

Else what the connector uses of a tensor, so that `make test` does not need PyTorch.
"""

from __future__ import annotations

import os
from typing import Any

import numpy.typing as npt

from aioflagcx.integrations.vllm.caches import Tensor


class ArrayTensor:
    def __init__(self, array: npt.NDArray[Any]) -> None:
        self.array = array
        self.shape = array.shape

    def data_ptr(self) -> int:
        return int(self.array.ctypes.data)

    def element_size(self) -> int:
        return self.array.itemsize

    def stride(self) -> tuple[int, ...]:
        return tuple(step // self.array.itemsize for step in self.array.strides)


def as_tensor(array: npt.NDArray[Any]) -> Tensor:
    """Of the same memory."""
    if os.environ.get("TEST_TORCH"):
        import torch

        tensor: Tensor = torch.from_numpy(array)
        return tensor
    return ArrayTensor(array)
