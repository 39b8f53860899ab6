"""Clients that are written for the originals run on ours by PYTHONPATH, unchanged."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from aioflagcx.integrations import flagcx
from aioflagcx.integrations.flagcx import FLAGCXLibrary


def shims() -> str:
    """As a user gets the folder."""
    command = [sys.executable, "-m", "aioflagcx.integrations", "path"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def run(program: str, *path: object, **environ: str) -> str:
    """A client's program with these folders in PYTHONPATH; what it says."""
    result = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path)), **environ},
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


MOONCAKE_CLIENT = """
import ctypes
from mooncake.engine import TransferEngine, TransferNotify, TransferOpcode

def start():
    engine = TransferEngine()
    code = engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", "")
    if code != 0:
        raise RuntimeError("Mooncake Transfer Engine initialization failed.")
    return engine, f"127.0.0.1:{engine.get_rpc_port()}"

prefill, _ = start()
decode, session = start()
src = ctypes.create_string_buffer(b"kv" * 512, 1024)
dst = ctypes.create_string_buffer(1024)
here, there = ctypes.addressof(src), ctypes.addressof(dst)
assert prefill.batch_register_memory([here], [1024]) == 0
assert decode.batch_register_memory([there], [1024]) == 0
assert prefill.batch_transfer_sync_write(session, [here, here + 512], [there + 512, there],
                                         [512, 512]) == 0
assert dst.raw == src.raw
print(TransferEngine.__module__)
"""


def test_a_client_of_mooncake_gets_ours() -> None:
    said = run(MOONCAKE_CLIENT, shims(), MC_FORCE_TCP="1")
    assert said == "aioflagcx.integrations.mooncake.engine\n"


def test_a_client_of_mooncake_is_told_why_it_fails(capfd: pytest.CaptureFixture[str]) -> None:
    """By the log's last resort, which needs no configuration."""
    with pytest.raises(AssertionError) as caught:
        run(MOONCAKE_CLIENT, shims(), AIOFLAGCX_DEVICES="soft")
    assert "MC_FORCE_TCP" in str(caught.value)
    assert "initialization failed" in str(caught.value)


def test_the_rest_of_a_mooncake_that_is_installed_stays_where_it_was(tmp_path: Path) -> None:
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "__init__.py").write_text("from mooncake.store import name as BufferPool")
    (package / "engine.py").write_text("TransferEngine = SharedSegment = 'the original'")
    (package / "store.py").write_text("MooncakeDistributedStore = name = 'the original'")
    (package / "segment.py").write_text("from .engine import SharedSegment")
    said = run(
        """
        import sys
        from mooncake.engine import TransferEngine
        from mooncake.store import MooncakeDistributedStore
        print(TransferEngine.__module__, MooncakeDistributedStore)

        from mooncake import BufferPool, engine, segment
        print(BufferPool, segment.SharedSegment, engine.SharedSegment)
        assert engine.TransferEngine is TransferEngine
        for module, name in (engine, "no_such"), (sys.modules["mooncake"], "no_such"):
            assert not hasattr(module, name)
        """,
        shims(),
        tmp_path,
    )
    assert said == (
        "aioflagcx.integrations.mooncake.engine the original\n"
        "the original the original the original\n"
    )


@pytest.mark.parametrize("without", ["mooncake", "plugin", "plugin.interservice"])
def test_a_package_that_is_a_shim_alone_has_nothing_else(without: str) -> None:
    said = run(
        f"""
        import {without} as package
        try:
            from {without} import BufferPool
        except ImportError as error:
            print(error.name, hasattr(package, "BufferPool"))
        """,
        shims(),
    )
    assert said == f"{without} False\n"


def test_the_original_module_is_loaded_by_a_name_of_its_own(tmp_path: Path) -> None:
    """An extension module replaces what has its name in sys.modules."""
    package = tmp_path / "mooncake"
    package.mkdir()
    (package / "engine.py").write_text("name = __name__")
    said = run("import mooncake.engine; print(mooncake.engine.name)", shims(), tmp_path)
    assert said == "original.mooncake.engine\n"


def test_another_package_with_the_name_of_a_shim_stays_importable(tmp_path: Path) -> None:
    """A name as common as `plugin`."""
    package = tmp_path / "plugin"
    package.mkdir()
    (package / "__init__.py").write_text("from .registry import Registry")
    (package / "registry.py").write_text("Registry = 'another'")
    said = run("from plugin import Registry, registry; print(Registry)", shims(), tmp_path)
    assert said == "another\n"


FLAGCX_CLIENT = """
import ctypes, os, sys
path = os.getenv("FLAGCX_PATH")
if path and os.path.isdir(path):
    sys.path.append(path)
from plugin.interservice.flagcx_wrapper import (
    FLAGCXLibrary,
    buffer_type,
    flagcxComm_t,
    flagcxDataTypeEnum,
)

flagcx = FLAGCXLibrary("libflagcx.so")
prefill, decode = flagcx.flagcxP2pEngineCreate(), flagcx.flagcxP2pEngineCreate()
src = ctypes.create_string_buffer(b"kv" * 512, 1024)
dst = ctypes.create_string_buffer(1024)
here, there = ctypes.addressof(src), ctypes.addressof(dst)
flagcx.flagcxP2pRegisterHost(prefill, here, 1024)
flagcx.flagcxP2pRegister(decode, there, 1024)
port = flagcx.flagcxP2pGetRpcPort(decode)
flagcx.flagcxP2pStartRpcServer(decode)
conn = flagcx.flagcxP2pGetConn(prefill, f"127.0.0.1:{port}")
flagcx.flagcxP2pBatchWriteSync(conn, [here, here + 512], [there + 512, there], [512, 512])
assert dst.raw == src.raw
flagcx.flagcxP2pEngineDestroy(prefill)
flagcx.flagcxP2pEngineDestroy(decode)
"""

ORIGINAL = """
import dataclasses

@dataclasses.dataclass
class Function:
    name: str

buffer_type = "the original's buffer"
flagcxComm_t = "the original's communicator"

class flagcxDataTypeEnum:
    flagcxFloat16 = 6

class FLAGCXLibrary:
    made = 0

    def __init__(self, so_file=None):
        FLAGCXLibrary.made += 1
        self.so_file = so_file

    def flagcxAllReduce(self, *arguments):
        return "reduced", self.so_file, FLAGCXLibrary.made, *arguments

    def flagcxP2pEngineCreate(self):
        raise AssertionError("this one is ours")
"""


def original(folder: Path) -> Path:
    file = folder / "plugin/interservice/flagcx_wrapper.py"
    file.parent.mkdir(parents=True)
    file.write_text(ORIGINAL)
    return folder


def test_a_client_of_flagcx_gets_ours_without_an_original() -> None:
    said = run(
        FLAGCX_CLIENT
        + """
for name, call in {
    "flagcxAllReduce": lambda: flagcx.flagcxAllReduce(here, there, 1, 6, 0, None, None),
    "adaptor_stream_create": lambda: flagcx.adaptor_stream_create(),
    "flagcxDataTypeEnum": lambda: flagcxDataTypeEnum.from_torch(None),
    "buffer_type": lambda: buffer_type(here),
}.items():
    try:
        call()
    except NotImplementedError as error:
        assert name in str(error), error
        assert "PYTHONPATH" in str(error), error
    else:
        raise AssertionError(name)
print("done")
""",
        shims(),
    )
    assert said == "done\n"


@pytest.mark.parametrize("by", ["PYTHONPATH", "FLAGCX_PATH"])
def test_a_client_of_flagcx_gets_the_rest_from_the_original(tmp_path: Path, by: str) -> None:
    folder = original(tmp_path)
    program = (
        FLAGCX_CLIENT
        + """
import plugin.interservice.flagcx_wrapper as wrapper
assert wrapper.Function(name="x").name == "x"
print(buffer_type, flagcxComm_t, flagcxDataTypeEnum.flagcxFloat16, sep=", ")
print(*flagcx.flagcxAllReduce(1), *flagcx.flagcxAllReduce(2))
try:
    wrapper.no_such_name
except AttributeError as error:
    assert "no_such_name" in str(error)
"""
    )
    if by == "PYTHONPATH":
        said = run(program, shims(), folder)
    else:
        said = run(program, shims(), FLAGCX_PATH=str(folder))
    assert said.splitlines() == [
        "the original's buffer, the original's communicator, 6",
        "reduced libflagcx.so 1 1 reduced libflagcx.so 1 2",
    ]


def test_an_original_that_cannot_be_loaded_says_so(tmp_path: Path) -> None:
    file = original(tmp_path) / "plugin/interservice/flagcx_wrapper.py"
    file.write_text("import no_such_module_7")
    with pytest.raises(AssertionError, match="no_such_module_7"):
        run("from plugin.interservice.flagcx_wrapper import buffer_type", shims(), tmp_path)
    said = run(
        """
        from plugin.interservice.flagcx_wrapper import FLAGCXLibrary
        FLAGCXLibrary().flagcxP2pEngineDestroy(FLAGCXLibrary().flagcxP2pEngineCreate())
        print("works")
        """,
        shims(),
        tmp_path,
    )
    assert said == "works\n"


def test_the_modules_work_without_shims_as_well() -> None:
    with pytest.raises(NotImplementedError, match="flagcxAllReduce"):
        FLAGCXLibrary().flagcxAllReduce()
    with pytest.raises(NotImplementedError, match="flagcxRedOpTypeEnum"):
        flagcx.flagcxRedOpTypeEnum.from_torch(None)
    for name in ("__wrapped__", "_private"):
        assert not hasattr(flagcx, name)
        assert not hasattr(FLAGCXLibrary(), name)
