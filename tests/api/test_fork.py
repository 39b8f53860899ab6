"""A forked child has a copy of the engines, but none of their threads.

It leaves by os._exit: unwinding a running event loop in a child takes the parent's descriptors out
of the epoll that both share, whatever they are for; that is asyncio's to solve.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import asyncio, gc, os
import numpy as np
from aioflagcx import Config, Engine

async def main():
    config = Config(soft_paths=("{path}",))
    async with Engine(config=config) as ours, Engine(config=config) as theirs:
        src, dst = np.arange(1 << 20, dtype=np.uint8), np.zeros(1 << 20, np.uint8)
        local = await ours.register(src)
        await theirs.register(dst, name="dst")
        owned = await ours.alloc(1 << 20)
        owned.numpy()[:] = src
        session = await ours.connect(theirs.session_id)
        await ours.write(session, local, session.regions["dst"], 1000)
        child = os.fork()
        if child == 0:
            await ours.close()
            await theirs.close()
            view = owned.numpy()
            del local, session, owned
            gc.collect()
            view[2] = 77  # the parent's memory too
            del view
            gc.collect()
            os._exit(7)
        _, status = await asyncio.to_thread(os.waitpid, child, 0)
        assert os.waitstatus_to_exitcode(status) == 7, status
        remote = session.regions["dst"]
        assert await ours.write(session, local, remote, local, timeout=20) == local.size
        assert (src == dst).all()
        assert owned.view()[2] == 77
        assert await ours.write(session, owned, remote, owned, timeout=20) == owned.size
        assert (owned.numpy() == dst).all()
        await ours.deregister(owned)
        gc.collect()
        await ours.alloc(1)  # the thread that frees has come and gone

asyncio.run(main())
"""


@pytest.mark.parametrize("path", ["process", "tcp"])
def test_a_forked_child_that_closes_its_copies_disturbs_nobody(path: str) -> None:
    program = PROGRAM.format(path=path)
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
