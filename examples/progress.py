"""A progress bar that follows transfers; shown only when standard error is a terminal."""

from __future__ import annotations

import asyncio

from tqdm import tqdm

from aioflagcx import Transfer

__all__ = ["Progress"]

_REFRESH = 0.1
"""Seconds between two looks at a running transfer."""


class Progress:
    """Counts the bytes of any number of transfers, one after the other; a context manager."""

    def __init__(self, total: int, label: str) -> None:
        self._bar = tqdm(
            total=total,
            desc=label,
            unit="iB",
            unit_scale=True,
            unit_divisor=1024,
            # Without the rate: between transfers there is work that is not theirs.
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]",
            disable=None,  # where there is no terminal
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    async def follow(self, transfer: Transfer) -> int:
        """``await transfer``, while the bar shows how far it is."""
        before = self._bar.n
        show = asyncio.create_task(self._show(transfer, before))
        try:
            return await transfer
        finally:
            show.cancel()
            self._bar.update(before + transfer.bytes_done - self._bar.n)

    async def _show(self, transfer: Transfer, before: float) -> None:
        while not self._bar.disable:
            self._bar.update(before + transfer.bytes_done - self._bar.n)
            await asyncio.sleep(_REFRESH)
