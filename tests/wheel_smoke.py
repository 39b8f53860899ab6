"""Uses the installed package the way a first program would; run by ``make wheel-check``.

Two engines in one process: one writes an array into the other's registered memory.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

import aioflagcx

NBYTES = 1 << 20  # many slices, and still instant


async def main() -> None:
    source = np.random.default_rng(seed=1).integers(0, 256, NBYTES, dtype=np.uint8)
    target = np.zeros(NBYTES, dtype=np.uint8)

    async with aioflagcx.Engine() as a, aioflagcx.Engine() as b:
        region = await a.register(source, name="x")
        await b.register(target, name="x")
        session = await a.connect(b.session_id)
        await a.write(session, region, session.regions["x"], NBYTES)

    if not np.array_equal(source, target):
        sys.exit("wheel_smoke: the target's bytes differ from the source's")


if __name__ == "__main__":
    package = Path(aioflagcx.__file__).resolve()
    if not package.is_relative_to(Path(sys.prefix).resolve()):
        sys.exit(f"wheel_smoke: aioflagcx comes from {package}, not from the installed wheel")
    aioflagcx.run(main())
    print(f"wheel_smoke: wrote {NBYTES} bytes with {package.parent}")
