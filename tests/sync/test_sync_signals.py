"""Ctrl-C: what the main thread waits for ends first, cleanly; then KeyboardInterrupt comes."""

from __future__ import annotations

import _thread
import signal
import socket
import time

import pytest
from conformance.sync.threads_pair import InThread, Pair, until
from sync.children import running

from aioflagcx.sync.loop_thread import LoopThread

WRITING = """
pair = Pair()

def moved():
    stats = pair.ours.stats()
    return stats.bytes_written + stats.bytes_read

def tell():
    before = moved()
    until(lambda: moved() > before and main_thread_waits_in("_await"))
    say("go")

def wait():
    if arguments[0] == "write":
        pair.ours.write(*pair.long, timeout=None)
    elif arguments[0] == "notify":
        pair.ours.write(*pair.long, timeout=None, notify=("never", b""))
    elif arguments[0] == "read":
        pair.ours.read(*pair.long, timeout=None)
    else:
        pair.ours.submit_write(*pair.long, timeout=None).result()

for _ in range(10):
    in_thread(tell)
    try:
        wait()
    except KeyboardInterrupt:
        pair.src[:] = 0x99  # reading it now would show at the peer
        assert pair.is_quiet()
        assert (pair.dst == 0x11).all()
    else:
        raise SystemExit("it was not interrupted")
    if arguments[0] != "read":
        pair.src[:] = 0x11
assert pair.write() == 4096
pair.dst[:4096] = 0x11
pair.close()
assert (pair.dst == 0x11).all()
say("over")
"""


@pytest.mark.parametrize("call", ["write", "notify", "read", "result"])
def test_a_transfer_is_quiet_before_keyboard_interrupt_is_raised(path: str, call: str) -> None:
    with running(WRITING, path, call) as child:
        for _ in range(10):
            assert child.line() == "go", child.end()
            child.signal(signal.SIGINT)
        assert child.line() == "over", child.end()
        child.end()


CONNECTING = """
engine = Engine(config=config)
engine.start()
region = engine.register(bytearray(8))
try:
    if arguments[1] == "connect":
        engine.connect(arguments[0], timeout=None)
    else:
        engine.write(arguments[0], region, 1, 1, timeout=None)
except KeyboardInterrupt:
    stats = engine.stats()
    assert stats.sessions == stats.transfers_pending == 0
    say("interrupted")
engine.close()
"""


@pytest.mark.parametrize("call", ["connect", "write"])
def test_connecting_is_given_up(path: str, call: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        peer = f"127.0.0.1:{listener.getsockname()[1]}"
        with running(CONNECTING, path, peer, call) as child:
            connection, _ = listener.accept()
            with connection:
                child.signal(signal.SIGINT)
                assert child.line() == "interrupted", child.end()
                child.end()


NOTIFIED = """
pair = Pair()
queue = pair.theirs._engine._queue

def tell():
    until(lambda: queue._waiters and main_thread_waits_in("_next"))
    say("go")

for round_ in range(5):
    in_thread(tell)
    try:
        if arguments[0] == "iterate":
            for note in pair.theirs.notifications():
                raise SystemExit("nobody sent any")
        else:
            pair.theirs.notifications().get()
    except KeyboardInterrupt:
        pass
    until(lambda: not queue._waiters)
    pair.session.notify(str(round_), b"")
    assert next(pair.theirs.notifications()).name == str(round_)  # nobody else took it
pair.close()
say("over")
"""


@pytest.mark.parametrize("call", ["iterate", "get"])
def test_waiting_for_notifications_is_given_up(path: str, call: str) -> None:
    with running(NOTIFIED, path, call) as child:
        for _ in range(5):
            assert child.line() == "go", child.end()
            child.signal(signal.SIGINT)
        assert child.line() == "over", child.end()
        child.end()


LOOKING = """
pair = Pair()
transfer = pair.ours.submit_write(*pair.long, timeout=None)

def tell():
    until(lambda: transfer.bytes_done and main_thread_waits_in("wait"))
    say("go")

in_thread(tell)
try:
    transfer.wait()
except KeyboardInterrupt:
    assert not transfer.done()
    before = transfer.bytes_done
    until(lambda: transfer.bytes_done > before)  # it goes on
    transfer.cancel()
    assert isinstance(transfer.exception(), TransferCancelled)
    say("over")
pair.close()
"""


def test_wait_leaves_the_transfer_alone(path: str) -> None:
    with running(LOOKING, path) as child:
        assert child.line() == "go", child.end()
        child.signal(signal.SIGINT)
        assert child.line() == "over", child.end()
        child.end()


UNHANDLED = """
with Engine(config=config) as ours, Engine(config=config) as theirs:
    region = ours.register(np.zeros(1 << 20, np.uint8))
    target = theirs.register(np.zeros(1 << 20, np.uint8))
    pieces = np.zeros(200_000, np.int64)

    def tell():
        until(lambda: ours.stats().bytes_written and main_thread_waits_in("_await"))
        say("go")

    in_thread(tell)
    ours.write(theirs.session_id, pieces + region.addr, pieces + target.addr, 1 << 20)
"""


def test_a_program_that_does_not_handle_it_ends(path: str) -> None:
    with running(UNHANDLED, path) as child:
        assert child.line() == "go", child.end()
        child.signal(signal.SIGINT)
        assert child.end(-signal.SIGINT).endswith("KeyboardInterrupt\n")


ANY_TIME = """
# A signal handler that raises between any two steps of the interpreter, inside the library, and
# soon after that once more.
class Interrupted(Exception):
    pass

again = False

def interrupt(number, frame):
    global again
    if again:
        again = False
        signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-6, 300e-6)))
    while frame is not None:
        if "/aioflagcx/" in frame.f_code.co_filename:
            raise Interrupted
        frame = frame.f_back

pair = Pair()
rng = np.random.default_rng(int(arguments[0]))
blocks = np.arange(256, dtype=np.int64) * 4096
notes = pair.theirs.notifications()
calls = {
    "write": lambda: pair.write(4096),
    "large": lambda: pair.write(1 << 20),
    "pieces": lambda: pair.ours.write(
        pair.session, pair.local.addr + blocks, pair.remote.addr + blocks, 4096),
    "read": lambda: pair.ours.read(pair.session, pair.local, pair.remote, 4096),
    "submit": lambda: pair.ours.submit_write(
        pair.session, pair.local, pair.remote, 1 << 20).result(),
    "miss": lambda: pair.ours.write(pair.session, pair.local, 1, 1),
    "notify": lambda: pair.write(64, notify=("name", b"")),
    "get": lambda: notes.get(0.002),
    "refresh": pair.session.refresh,
    "connect": lambda: pair.ours.connect(pair.theirs.session_id),
}
names = list(calls)
interrupted = dict.fromkeys(names, 0)
signal.signal(signal.SIGALRM, interrupt)
sys.unraisablehook = lambda unraisable: None  # in a finalizer it is ignored
for _ in range(1500):
    name = names[rng.integers(len(names))]
    call = calls[name]
    until(pair.is_quiet)
    again = True
    signal.setitimer(signal.ITIMER_REAL, float(rng.uniform(1e-6, 300e-6)))
    ends = time.monotonic() + 0.05
    try:
        while time.monotonic() < ends:
            try:
                call()
            except (RemoteAddressError, TimeoutError, NotifyRefused):
                pass
    except Interrupted:
        signal.setitimer(signal.ITIMER_REAL, 0)
        interrupted[name] += 1
        # Only submit_write() may be interrupted when it has just submitted.
        assert pair.is_quiet() or name == "submit", name
assert min(interrupted.values()) > 50, interrupted
until(pair.is_quiet)
assert not pair.ours._engine._open.runtime.flights.active
pair.src[:] = 0x55
assert pair.write(1 << 20) == 1 << 20
assert (pair.dst == 0x55).all()
pair.close()
say("over")
"""


@pytest.mark.parametrize("seed", ["1", "2"])
def test_a_signal_handler_that_raises_at_any_time(path: str, seed: str) -> None:
    with running(ANY_TIME, path, seed) as child:
        assert child.line() == "over", child.end()
        child.end()


def test_an_interrupt_that_no_signal_brings(pair: Pair) -> None:
    def interrupt() -> None:
        until(lambda: pair.ours.stats().bytes_written)
        time.sleep(0.01)  # it is in the wait by now
        _thread.interrupt_main()

    interrupting = InThread(interrupt)
    with pytest.raises(KeyboardInterrupt):
        pair.write_long(timeout=None)
    interrupting.result()
    assert not pair.ours.stats().transfers_pending


def test_what_has_come_about_when_it_is_interrupted_is_undone() -> None:
    loop = LoopThread()
    undone: list[int] = []

    async def interrupt() -> int:
        _thread.interrupt_main()
        return 5

    async def nothing() -> None:
        pass

    try:
        with pytest.raises(KeyboardInterrupt):
            loop.run(interrupt, undone.append)
        loop.run(nothing)
        assert undone == [5]
    finally:
        loop.stop()
