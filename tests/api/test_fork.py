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


OWN_ENGINE = """
import asyncio, os, threading
import numpy as np
from aioflagcx import Config, Engine

async def parent(started, ended):
    async with Engine(config=Config(soft_paths={paths})) as engine:
        memory = np.zeros(1000, np.uint8)
        await engine.register(memory, name="memory")
        await engine.connect(engine.session_id)
        started.append(engine.session_id)
        await asyncio.to_thread(ended.wait)
        assert (memory == 7).all()

async def child(session_id):
    async with Engine(config=Config(soft_paths={paths})) as engine:
        session = await engine.connect(session_id)
        assert session.path == "{path}", session.path
        region = await engine.register(np.full(1000, 7, np.uint8))
        await engine.write(session, region, session.regions["memory"], region)
        await engine.write(session, region, session.regions["memory"], region, notify=("n", b""))

started, ended = [], threading.Event()
thread = threading.Thread(target=asyncio.run, args=(parent(started, ended),))
thread.start()
while not started:
    thread.join(0.001)
pid = os.fork()
if pid == 0:
    try:
        asyncio.run(child(started[0]))
    except BaseException:
        import traceback
        traceback.print_exc()
        os._exit(1)
    os._exit(7)
_, status = os.waitpid(pid, 0)
ended.set()
thread.join()
assert os.waitstatus_to_exitcode(status) == 7, status
"""


@pytest.mark.parametrize("path", ["process", "local", "tcp"])
def test_a_forked_child_that_closes_its_copies_disturbs_nobody(path: str) -> None:
    run_program(PROGRAM.format(path=path))


@pytest.mark.parametrize("path", ["local", "tcp"])
def test_a_forked_child_has_engines_of_its_own_which_reach_its_parents(path: str) -> None:
    """As those of another process: what they inherit does not pass for their own."""
    run_program(OWN_ENGINE.format(path=path, paths=("process", path)))


def run_program(program: str) -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert run.returncode == 0, run.stderr
