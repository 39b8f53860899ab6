"""Blocking engines at the end of the interpreter, in forked children, and with peers that stop."""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest
from promises.measures import SLACK
from sync.children import run, running

from aioflagcx import Config
from aioflagcx.errors import PeerLost, TransferTimeout
from aioflagcx.sync import Engine

# The end of the interpreter -----------------------------------------------------------------------

LEFT_OPEN = {
    "nothing": "",
    "a region": "region = pair.ours.register(bytearray(1 << 20))",
    "a transfer": "transfer = pair.ours.submit_write(*pair.long)",
    "a dropped transfer": "pair.ours.submit_write(*pair.long)",
    "a transfer of the loop": "transfer = pair.ours.submit_write(*pair.long, notify=('n', b''))",
    "a thread in write": """
def work():
    try:
        pair.ours.write(*pair.long, timeout=None)
    except EngineClosed:
        pass

for _ in range(8):
    in_thread(work, daemon=True)
until(lambda: pair.ours.stats().transfers_pending == 8)
""",
    "threads in a row of writes": """
def work():
    try:
        while True:
            pair.write()
    except EngineClosed:
        pass

for _ in range(8):
    in_thread(work, daemon=True)
until(lambda: pair.ours.stats().transfers_done > 100)
""",
    "threads that wait for everything": """
def swallow(call):
    def work():
        try:
            call()
        except EngineClosed:
            pass
    return work

notes = pair.ours.notifications()
for call in (notes.get, lambda: list(notes)):
    for _ in range(4):
        in_thread(swallow(call), daemon=True)
until(lambda: len(pair.ours._engine._queue._waiters) == 8)
""",
    "an exception": """
sys.excepthook = lambda *error: None
raise SystemExit(0)
""",
}


@pytest.mark.parametrize("what", LEFT_OPEN)
def test_engines_that_are_open_at_the_end_are_closed(path: str, what: str) -> None:
    assert run("pair = Pair()\n" + LEFT_OPEN[what], path) == ""


OUTLIVING = """
pair = Pair()
ended = threading.Event()

def work():
    threading.main_thread().join()  # the main thread has come to its end
    time.sleep(0.1)  # and the interpreter's executors to theirs, which nothing tells
    assert pair.write() == 4096
    with Engine(config=config) as other:
        region = other.register(bytearray(4096))
        pair.session.close()
        pair.ours.write(other.session_id, pair.local, region, 4096, notify=("n", b""))
        assert next(other.notifications()).name == "n"
    say("worked")

in_thread(work)
"""


def test_threads_that_outlive_the_main_thread_can_go_on(path: str) -> None:
    with running(OUTLIVING, path) as child:
        assert child.line() == "worked", child.end()
        assert child.end() == ""


# Forked children ----------------------------------------------------------------------------------

FORKING = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of forking beside threads
pair = Pair()
transfer = pair.ours.submit_write(*pair.long, timeout=None)
until(lambda: transfer.bytes_done)
child = os.fork()
if child == 0:
    calls = [pair.write, transfer.result, transfer.wait, pair.session.refresh, pair.ours.start,
             pair.theirs.notifications().get, lambda: pair.ours.register(bytearray(8)),
             lambda: pair.ours.connect("127.0.0.1:1")]
    for call in calls:
        try:
            call()
        except RuntimeError as error:
            assert "fork" in str(error)
        else:
            os._exit(1)
    pair.theirs.close()
    pair.theirs.close()
    if arguments[0] == "closed":
        pair.ours.close()
    elif arguments[0] == "dropped":
        del pair, transfer, calls, call
        gc.collect()
    sys.exit(7)  # the ordinary way: with whatever is done at exit
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 7, status
before = transfer.bytes_done
until(lambda: transfer.bytes_done > before)
transfer.cancel()
transfer.wait()
pair.src[:] = 0x77
assert pair.write(1 << 20) == 1 << 20
assert (pair.dst == 0x77).all()
pair.session.refresh()
pair.close()
say("over")
"""


@pytest.mark.parametrize("end", ["closed", "dropped", "left"])
def test_a_forked_childs_copies_do_nothing(path: str, end: str) -> None:
    with running(FORKING, path, end) as child:
        assert child.line() == "over", child.end()
        child.end()


# Peers in other processes -------------------------------------------------------------------------

PEER = """
engine = Engine(config=config)
engine.start()
region = engine.register(np.zeros(1 << 20, np.uint8))
say(engine.session_id, region.addr)
sys.stdin.read()
engine.close()
"""


@pytest.mark.parametrize("kind", ["past the loop", "on the loop"])
def test_a_peer_that_stops_confirms_nothing(kind: str) -> None:
    """Promises 1 and 2: the call ends in time, quiet here, and says that the peer may not be."""
    config = Config(soft_paths=("tcp",), drain_timeout=0.4, keepalive_timeout=60)
    with running(PEER, "tcp") as child, Engine(config=config) as engine:
        session_id, address = child.line().split()
        source = np.full(1 << 20, 0x11, np.uint8)
        region = engine.register(source)
        session = engine.connect(session_id)
        pieces = np.zeros(20_000, np.int64)
        options = {} if kind == "past the loop" else {"notify": ("never", b"")}
        child.signal(signal.SIGSTOP)
        started = time.monotonic()
        with pytest.raises(TransferTimeout) as caught:
            engine.write(
                session, pieces + region.addr, pieces + int(address), region, timeout=0.3, **options
            )
        assert 0.3 <= time.monotonic() - started < 0.3 + 0.4 + SLACK
        assert not caught.value.remote_quiet
        stats = engine.stats()
        assert not stats.transfers_inflight
        assert not stats.bytes_inflight
        assert not stats.transfers_pending
        engine.deregister(region)  # nobody uses it any more
        child.signal(signal.SIGCONT)


def test_a_peer_that_dies_fails_what_is_under_way() -> None:
    """Promise 5, for threads past the loop; the next call says so at once."""
    config = Config(soft_paths=("tcp",), keepalive_interval=0.1, keepalive_timeout=0.5)
    with running(PEER, "tcp") as child, Engine(config=config) as engine:
        session_id, address = child.line().split()
        region = engine.register(np.zeros(1 << 20, np.uint8))
        session = engine.connect(session_id)
        pieces = np.zeros(20_000, np.int64)
        transfer = engine.submit_write(
            session, pieces + region.addr, pieces + int(address), region, timeout=None
        )
        while not transfer.bytes_done:
            transfer.wait(0.001)
        child.signal(signal.SIGKILL)
        with pytest.raises(PeerLost) as caught:
            transfer.result(20)
        assert caught.value.peer == session.id
        assert not session.alive
        assert engine.stats().transfers_pending == 0
