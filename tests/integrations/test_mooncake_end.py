"""How Mooncake's engine ends: closed, dropped, forked away from, and with the interpreter."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
import warnings
from collections.abc import Callable

import pytest
from integrations.processes import until

from aioflagcx.integrations.mooncake import TransferEngine
from aioflagcx.sync import Engine

Engines = Callable[..., TransferEngine]

GOOD = "127.0.0.1", "P2PHANDSHAKE", "tcp", ""


def test_an_interrupted_close_has_closed(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the blocking engine raises at the end what a signal handler has raised meanwhile."""
    engine = engines()

    def interrupted(closing: Engine) -> None:
        close(closing)
        raise KeyboardInterrupt

    close = Engine.close
    with monkeypatch.context() as patch:
        patch.setattr(Engine, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.close()
    assert engine.get_rpc_port() == -1
    assert engine.initialize(*GOOD) == 0
    assert engine.get_rpc_port() > 0


def test_an_engine_that_is_dropped_ends_by_itself(engines: Engines) -> None:
    """Without a warning: Mooncake's callers have no other way to end it."""
    peer = engines()
    engine = TransferEngine()
    assert engine.initialize(*GOOD) == 0
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    assert peer.send_probe(session) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del engine
        gc.collect()
    until(lambda: peer.send_probe(session) == -1)


def run(program: str) -> str:
    """In a process of its own; what it has said."""
    preamble = """
        import os, signal, sys, threading, time
        import numpy as np
        from aioflagcx.integrations.mooncake import TransferEngine, TransferOpcode
        GOOD = "127.0.0.1", "P2PHANDSHAKE", "tcp", ""
        memory = np.zeros(1 << 20, np.uint8)
        address = memory.ctypes.data
        def make():
            engine = TransferEngine()
            assert engine.initialize(*GOOD) == 0, engine.last_error()
            assert engine.register_memory(address, 1 << 20) == 0, engine.last_error()
            return engine, f"127.0.0.1:{engine.get_rpc_port()}"
    """
    result = subprocess.run(
        [sys.executable, "-W", "error", "-X", "faulthandler", "-c",
         textwrap.dedent(preamble) + textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, (result.returncode, result.stderr)
    return result.stdout


def test_a_forked_child_begins_anew_and_its_parent_notices_nothing() -> None:
    out = run("""
        engine, session = make()
        assert engine.transfer_sync_write(session, address, address, 4096) == 0
        number = engine.transfer_submit_write(session, address, address, 4096)
        child = os.fork()
        if child == 0:
            assert engine.get_rpc_port() == -1
            assert "in this process" in engine.last_error()
            assert engine.transfer_sync_write(session, address, address, 1) == -1
            assert engine.transfer_check_status(number) == -1
            assert engine.unregister_memory(address) == -1
            assert engine.get_notifies() == []
            assert engine.initialize(*GOOD) == 0, engine.last_error()
            assert engine.register_memory(address, 4096) == 0
            assert engine.transfer_sync_write(session, address, address, 9) == 0, "to the parent"
            print("child", flush=True)
            sys.exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert engine.get_batch_transfer_status([number]) == 0
        assert engine.transfer_sync_write(session, address, address, 4096) == 0
        print("parent")
    """)
    assert out == "child\nparent\n"


@pytest.mark.parametrize("at_work", [False, True], ids=["idle", "at-work"])
def test_the_interpreter_ends_with_engines_open_and_calls_under_way(at_work: bool) -> None:
    run(f"""
        engine, session = make()
        begun = threading.Event()
        def work():
            while True:
                if engine.transfer_sync_write(session, address, address + (1 << 19), 1 << 19) != 0:
                    return
                begun.set()
        if {at_work}:
            for _ in range(4):
                threading.Thread(target=work, daemon=True).start()
            assert begun.wait(20)
            engine.transfer_submit_write(session, address, address + (1 << 19), 1 << 19)
    """)


def test_ctrl_c_ends_a_call_by_its_exception_and_the_engine_goes_on() -> None:
    run("""
        import socket
        signal.signal(signal.SIGINT, signal.default_int_handler)
        engine, session = make()
        listener = socket.create_server(("127.0.0.1", 0))  # accepts, and never answers
        silent = f"127.0.0.1:{listener.getsockname()[1]}"
        def interrupt():
            connection = listener.accept()
            os.kill(os.getpid(), signal.SIGINT)
            go_on.wait()
        go_on = threading.Event()
        threading.Thread(target=interrupt).start()
        try:
            engine.transfer_sync_write(silent, address, address, 1)
        except KeyboardInterrupt:
            pass
        else:
            sys.exit("no KeyboardInterrupt")
        go_on.set()
        assert engine.transfer_sync_write(session, address, address, 1) == 0
    """)
