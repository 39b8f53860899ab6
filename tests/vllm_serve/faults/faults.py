"""What an engine does wrong, as the file says whose name is in ENGINE_FAULT.

``nothing``: it reports success, and has moved nothing. ``flip``: it moves everything, with a byte
of each piece changed. ``fail``: it reports failure, and has moved nothing.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path


def fault() -> str:
    """What to do wrong now."""
    return Path(os.environ["ENGINE_FAULT"]).read_text()


def flip(address: int) -> None:
    """Make the bfloat16 at an address some 2**17, or minus that.

    Not as large as can be: vLLM would compute NaN, which stays in the blocks and spoils the answers
    of those who get them next.
    """
    high_byte = ctypes.c_uint8.from_address(address + 1)
    high_byte.value = 0x48 if high_byte.value != 0x48 else 0xC8
