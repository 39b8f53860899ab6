"""A transfer's address and length arguments, as the arrays the native core takes.

Pure. Values are checked by the native core, which names the index of the first bad one; this
module checks types and that the three arguments fit together.
"""

from __future__ import annotations

import contextlib
import operator
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from .region import AnyRegion

__all__ = ["Addresses", "Integers", "Pieces", "one_dimensional"]

Integers = npt.NDArray[np.int64] | npt.NDArray[np.uint64]
Addresses = Any
"""int | Sequence[int] | integer array | Region | RemoteRegion, see Engine.write."""

_LIMIT = 2**63


class Pieces:
    """Turns arguments into three equally long arrays (or `lens` of one element for all).

    Single pieces reuse the same three arrays, so the result is valid until the next call; the
    native core copies it at once.
    """

    __slots__ = ("_lens", "_local", "_remote")

    def __init__(self) -> None:
        self._local = np.zeros(1, np.int64)
        self._remote = np.zeros(1, np.int64)
        self._lens = np.zeros(1, np.int64)

    def arrays(
        self, local: Addresses, remote: Addresses, lens: Addresses
    ) -> tuple[Integers, Integers, Integers]:
        """(local, remote, lens), one-dimensional.

        Raises ValueError, naming the index, for integers outside 64 bits and for unequal
        lengths; TypeError for what is no integer.
        """
        if type(local) is not int and isinstance(local, AnyRegion):
            local = local.addr
        if type(remote) is not int and isinstance(remote, AnyRegion):
            remote = remote.addr
        if type(lens) is not int and isinstance(lens, AnyRegion):
            lens = lens.size
        if type(local) is int and type(remote) is int and type(lens) is int:
            try:
                self._local[0] = local
                self._remote[0] = remote
                self._lens[0] = lens
            except OverflowError:
                pass  # told in words below
            else:
                return self._local, self._remote, self._lens
        local_array, local_single = _array(local, "local")
        remote_array, remote_single = _array(remote, "remote")
        lens_array, lens_single = _array(lens, "lens")
        count = len(local_array)
        if local_single != remote_single or len(remote_array) != count:
            _unequal("local", local_array, local_single,
                     "remote", remote_array, remote_single)  # fmt: skip
        if not lens_single and (local_single or len(lens_array) != count):
            _unequal("local", local_array, local_single, "lens", lens_array, False)
        return local_array, remote_array, lens_array


def one_dimensional(argument: Any, what: str) -> Integers:
    """``argument`` as a contiguous one-dimensional 64-bit integer array.

    Raises ValueError and TypeError as :meth:`Pieces.arrays` does.
    """
    array, single = _array(argument, what)
    if single:
        raise TypeError(f"{what}: expected a sequence of integers, not one")
    return array


def _array(argument: Any, what: str) -> tuple[Integers, bool]:
    """As a contiguous 64-bit integer array, and whether it was a single integer."""
    if isinstance(argument, np.ndarray):
        array, single = argument, argument.ndim == 0
    elif isinstance(argument, bool | str | bytes | bytearray):
        raise TypeError(f"{what}: expected integers, not {type(argument).__name__}")
    else:
        single = False
        # A tensor of one element may pass for an integer, however many dimensions it has.
        if not getattr(argument, "ndim", 0):
            with contextlib.suppress(TypeError):
                argument, single = operator.index(argument), True
        array = _from_items(argument, what)
    if array.ndim != (0 if single else 1):
        raise ValueError(f"{what}: expected one dimension, not shape {array.shape}")
    if array.dtype.kind not in "iu":
        if array.size:
            raise TypeError(f"{what}: expected integers, not {array.dtype}")
        array = array.astype(np.int64)  # an empty list has no type of its own
    integers: Integers  # ascontiguousarray gives at least one dimension
    if array.dtype == np.uint64:
        integers = np.ascontiguousarray(array, np.uint64)
    else:
        integers = np.ascontiguousarray(array, np.int64)
    return integers, single


def _from_items(argument: Any, what: str) -> npt.NDArray[Any]:
    """A sequence, an integer or anything numpy makes an array of."""
    try:
        array = np.asarray(argument)
    except OverflowError:  # an integer that fits no 64-bit type
        array = np.asarray(argument, object)
    except ValueError as error:  # rows of different lengths
        raise ValueError(f"{what}: expected one dimension: {error}") from None
    if array.size and array.dtype.kind not in "iu" and array.ndim < 2:
        return _from_mixed(argument if array.ndim else [argument], what)
    return array


def _from_mixed(items: Any, what: str) -> npt.NDArray[np.uint64]:
    """Items that numpy found no common integer type for, or raise for the first bad one."""
    values = []
    for index, item in enumerate(items):
        if isinstance(item, bool | np.bool_):
            raise TypeError(f"{what}[{index}] is a bool, not an integer")
        try:
            value = operator.index(item)
        except TypeError:
            raise TypeError(
                f"{what}[{index}] is of type {type(item).__name__}, not an integer"
            ) from None
        if not 0 <= value <= _LIMIT:
            raise ValueError(f"{what}[{index}] = {value} is not in 0 to 2**63")
        values.append(value)
    return np.array(values, np.uint64)


def _unequal(
    one: str, first: Integers, first_single: bool, other: str, second: Integers, single: bool
) -> NoReturn:
    index = min(len(first), len(second))
    raise ValueError(
        f"{one} and {other} differ in length from index {index} on: "
        f"{'a single integer' if first_single else len(first)} and "
        f"{'a single integer' if single else len(second)}"
    )
