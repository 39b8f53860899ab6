"""How Mooncake's engine begins, and what it looks like to its callers."""

from __future__ import annotations

import inspect
import json
import os
import threading
from collections.abc import Callable

import numpy as np
import pytest
from conformance.sync.threads_pair import InThread, together
from integrations.processes import free_port, until

import aioflagcx.integrations.mooncake as module
from aioflagcx.errors import ConfigError
from aioflagcx.integrations.mooncake import (
    TransferEngine,
    TransferNotify,
    TransferOpcode,
    opened,
)
from aioflagcx.integrations.mooncake.settings import Settings
from aioflagcx.integrations.mooncake.topology import local_topology
from aioflagcx.sync import Engine
from aioflagcx.topology import Place, Topology

Engines = Callable[..., TransferEngine]

GOOD = "127.0.0.1", "P2PHANDSHAKE", "tcp", ""

PIECE = "target_hostname, buffer, peer_buffer_address, length"
BATCH = "target_hostname, buffers, peer_buffer_addresses, lengths"
SIGNATURES = {
    "initialize": "local_hostname, metadata_server, protocol, device_name",
    "initialize_ext": "local_hostname, metadata_server, protocol, device_name, metadata_type",
    "get_rpc_port": "",
    "register_memory": "buffer_addr, capacity, location='*'",
    "unregister_memory": "buffer_addr",
    "batch_register_memory": "buffer_addresses, capacities, location='*'",
    "batch_unregister_memory": "buffer_addresses",
    "transfer_sync_write": f"{PIECE}, transport_hint=''",
    "transfer_sync_read": f"{PIECE}, transport_hint=''",
    "transfer_sync": f"{PIECE}, opcode, notify=None, transport_hint=''",
    "transfer_submit_write": f"{PIECE}, transport_hint=''",
    "transfer_check_status": "batch_id",
    "batch_transfer_sync_write": f"{BATCH}, transport_hint=''",
    "batch_transfer_sync_read": f"{BATCH}, transport_hint=''",
    "batch_transfer_sync": f"{BATCH}, opcode, notify=None, transport_hint=''",
    "batch_transfer_async_write": f"{BATCH}, transport_hint=''",
    "batch_transfer_async_read": f"{BATCH}, transport_hint=''",
    "batch_transfer_async": f"{BATCH}, opcode, transport_hint=''",
    "get_batch_transfer_status": "batch_ids",
    "get_first_buffer_address": "segment_name",
    "send_probe": "peer_server_name",
    "get_notifies": "",
    "get_local_topology": "device_name=None",
    "allocate_managed_buffer": "length",
    "free_managed_buffer": "buffer_addr, length",
    "write_bytes_to_buffer": "dest_address, src_ptr, length",
    "read_bytes_from_buffer": "source_address, length",
    "get_engine": "",
    "warmup_efa_segment": "segment_name",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_names_and_order_of_arguments_are_mooncakes(name: str) -> None:
    signature = inspect.signature(getattr(TransferEngine(), name))
    words = [
        parameter.name
        if parameter.default is inspect.Parameter.empty
        else f"{parameter.name}={parameter.default!r}"
        for parameter in signature.parameters.values()
    ]
    assert ", ".join(words) == SIGNATURES[name]
    kinds = {parameter.kind for parameter in signature.parameters.values()}
    assert kinds <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_opcodes_and_notifications_are_mooncakes() -> None:
    assert (TransferOpcode.Read, TransferOpcode.Write) == (0, 1)
    assert (module.Read, module.Write) == tuple(TransferOpcode)
    assert TransferEngine.TransferOpcode is TransferOpcode
    empty = TransferNotify()
    assert (empty.name, empty.msg) == ("", "")
    empty.name, empty.msg = "n", "m"
    assert empty == TransferNotify("n", "m") == TransferNotify(msg="m", name="n")


def test_what_is_mooncakes_alone_is_told_that_there_is_none(engines: Engines) -> None:
    """So that a client which shares its engine with Mooncake's store has that open its own."""
    engine = engines(initialized=False)
    for _ in range(2):
        assert engine.get_engine() is None  # type: ignore[func-returns-value]
        assert engine.warmup_efa_segment("127.0.0.1:1") == 0
        assert engine.initialize(*GOOD) == 0


# Initializing -------------------------------------------------------------------------------------


def test_initializing_again_is_fine_with_the_same_arguments_only(engines: Engines) -> None:
    engine = engines()
    port = engine.get_rpc_port()
    assert port > 0
    assert engine.initialize(*GOOD) == 0
    assert engine.initialize_ext(*GOOD, "etcd") == 0
    assert engine.initialize("localhost", *GOOD[1:]) == -1
    assert "other arguments" in engine.last_error()
    assert engine.get_rpc_port() == port, "it is the same engine all the time"


def test_it_can_be_initialized_after_a_failure_and_after_its_end(engines: Engines) -> None:
    engine = engines(initialized=False)
    assert engine.initialize("no such host", *GOOD[1:]) == -1
    assert "no such host" in engine.last_error()
    assert engine.get_rpc_port() == -1
    for _ in range(2):
        assert engine.initialize(*GOOD) == 0
        assert engine.get_rpc_port() > 0
        assert engine.close() == 0


def test_an_engine_without_a_name_is_reached_by_any_address(engines: Engines) -> None:
    engine, other = engines(initialized=False), engines()
    assert engine.initialize("", *GOOD[1:]) == 0, engine.last_error()
    assert other.send_probe(f"127.0.0.1:{engine.get_rpc_port()}") == 0


def test_what_fails_on_the_way_leaves_nothing_open(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: Engine) -> None:
        raise OSError("no more files")

    engine = engines(initialized=False)
    threads, files = set(threading.enumerate()), len(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(opened, "Registrations", fail)
        assert engine.initialize(*GOOD) == -1
    assert "no more files" in engine.last_error()
    until(lambda: set(threading.enumerate()) <= threads)  # an executor's end by themselves
    assert len(os.listdir("/proc/self/fd")) <= files
    assert engine.initialize(*GOOD) == 0


def test_many_threads_initialize_one_engine(engines: Engines) -> None:
    engine = engines(initialized=False)

    def initialize(_: int) -> tuple[int, int]:
        return engine.initialize(*GOOD), engine.get_rpc_port()

    results = together(8, initialize)
    assert {code for code, _ in results} == {0}
    assert len({port for _, port in results}) == 1


def test_the_thread_that_initialized_may_have_ended(engines: Engines) -> None:
    engine = engines(initialized=False)
    assert InThread(engine.initialize, *GOOD).result() == 0
    memory = np.arange(200, dtype=np.uint8)
    assert engine.register_memory(memory.ctypes.data, 200) == 0
    session = f"127.0.0.1:{engine.get_rpc_port()}"
    address = memory.ctypes.data
    assert engine.transfer_sync_write(session, address, address + 100, 100) == 0
    assert np.array_equal(memory[100:], np.arange(100))


@pytest.mark.parametrize("metadata_server", ["etcd://127.0.0.1:2379", "127.0.0.1:2379", "", None])
def test_metadata_servers_are_refused_with_a_remedy(engines: Engines, metadata_server: str) -> None:
    engine = engines(initialized=False)
    assert engine.initialize("127.0.0.1", metadata_server, "tcp", "") == -1
    assert repr(metadata_server) in engine.last_error()
    assert "P2PHANDSHAKE" in engine.last_error()


@pytest.mark.parametrize("protocol", ["", "ascend", "efa", "RDMA", None, 1])
def test_other_protocols_are_refused(engines: Engines, protocol: str) -> None:
    engine = engines(initialized=False)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", protocol, "") == -1
    assert f"protocol {protocol!r}" in engine.last_error()


@pytest.mark.parametrize(
    "names", ["no_such_device_0", "no_such_device_0, no_such_device_1", "soft"]
)
def test_rdma_without_the_device_fails_and_says_what_to_do(engines: Engines, names: str) -> None:
    engine = engines(initialized=False)
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "rdma", names) == -1
    for word in ('protocol "rdma"', names.partition(",")[0], '"tcp"', "MC_FORCE_TCP"):
        assert word in engine.last_error()


def settings(*arguments: object, **environ: str) -> Settings:
    return Settings.from_arguments(*(arguments or GOOD), environ=environ)


def test_devices_are_those_of_the_protocol() -> None:
    """Rdma never falls back to a software device by itself."""
    rdma = "127.0.0.1", "P2PHANDSHAKE", "rdma"
    assert settings(*rdma, "").devices == "*"
    assert settings(*rdma, None).devices == "*"
    assert settings(*rdma, "mlx5_0, mlx5_1").devices == "mlx5_0,mlx5_1"
    assert settings(*rdma, "", AIOFLAGCX_DEVICES="mlx5_2").devices == "mlx5_2"
    with pytest.raises(ConfigError, match="soft"):
        settings(*rdma, "", AIOFLAGCX_DEVICES="soft")
    assert settings(*rdma, "", MC_FORCE_TCP="1").devices == "soft"
    assert settings(*rdma, "", MC_FORCE_TCP="0").devices == "*"
    assert settings().devices == "soft"
    assert settings("h", "P2PHANDSHAKE", "tcp", "mlx5_0").devices == "soft"
    assert settings(AIOFLAGCX_DEVICES="soft:2").devices == "soft:2"


@pytest.mark.parametrize(
    ("local_hostname", "host", "port"),
    [
        ("10.0.0.1", "10.0.0.1", 0),
        ("10.0.0.1:0", "10.0.0.1", 0),
        ("node-7:12345", "node-7", 12345),
        ("::1", "::1", 0),
        ("[::1]", "::1", 0),
        ("[::1]:80", "::1", 80),
    ],
)
def test_a_port_after_the_host_is_a_matter_of_mooncakes_variable(
    local_hostname: str, host: str, port: int
) -> None:
    arguments = local_hostname, *GOOD[1:]
    free = settings(*arguments)
    assert (free.host, free.advertise, free.port) == (host, host, 0)
    assert settings(*arguments, MC_LEGACY_RPC_PORT_BINDING="1").port == port
    elsewhere = settings(*arguments, MC_TCP_BIND_ADDRESS="0.0.0.0")
    assert (elsewhere.host, elsewhere.advertise) == ("0.0.0.0", host)


@pytest.mark.parametrize("local_hostname", ["0.0.0.0", "0.0.0.0:17000", "::", "[::]:17000", ""])
def test_a_host_that_listens_everywhere_tells_peers_an_address(local_hostname: str) -> None:
    chosen = settings(local_hostname, *GOOD[1:])
    assert chosen.host in ("0.0.0.0", "::")
    assert chosen.advertise is None


@pytest.mark.parametrize("local_hostname", [None, 7, "h:port", "h:99999"])
def test_bad_hostnames_are_refused(engines: Engines, local_hostname: str) -> None:
    engine = engines(initialized=False)
    assert engine.initialize(local_hostname, *GOOD[1:]) == -1
    assert "local_hostname" in engine.last_error()


@pytest.mark.parametrize("protocol", ["tcp", "rdma"])
@pytest.mark.parametrize("local_hostname", ["192.0.2.77", "no such host"])
def test_a_host_that_is_not_this_one_is_told_with_a_remedy(
    engines: Engines, monkeypatch: pytest.MonkeyPatch, local_hostname: str, protocol: str
) -> None:
    monkeypatch.setenv("AIOFLAGCX_DEVICES", "soft")
    monkeypatch.setenv("MC_FORCE_TCP", "1")
    engine = engines(initialized=False)
    arguments = local_hostname, "P2PHANDSHAKE", protocol, ""
    assert engine.initialize(*arguments) == -1
    assert local_hostname in engine.last_error()
    assert "MC_TCP_BIND_ADDRESS" in engine.last_error()
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "127.0.0.1")
    assert engine.initialize(*arguments) == 0, engine.last_error()


def test_mooncakes_timeout_counts_unless_ours_is_given() -> None:
    assert settings().config.transfer_timeout == 30
    assert settings(MC_TRANSFER_TIMEOUT="77").config.transfer_timeout == 77
    assert settings(MC_TRANSFER_TIMEOUT="1").config.transfer_timeout == 5
    both = settings(MC_TRANSFER_TIMEOUT="77", AIOFLAGCX_TRANSFER_TIMEOUT="9")
    assert both.config.transfer_timeout == 9
    with pytest.raises(ConfigError, match="MC_TRANSFER_TIMEOUT"):
        settings(MC_TRANSFER_TIMEOUT="soon")


def test_the_bound_address_may_differ_from_what_peers_use(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_TCP_BIND_ADDRESS", "0.0.0.0")
    engine, other = engines(initialized=False), engines()
    assert engine.initialize("localhost", *GOOD[1:]) == 0
    for host in ("localhost", "127.0.0.1"):
        assert other.send_probe(f"{host}:{engine.get_rpc_port()}") == 0


def test_an_engine_works_by_ipv6(engines: Engines) -> None:
    engine = engines(initialized=False)
    assert engine.initialize("::1", *GOOD[1:]) == 0, engine.last_error()
    assert engine.send_probe(f"[::1]:{engine.get_rpc_port()}") == 0


def test_a_fixed_port_that_is_taken_is_told(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_LEGACY_RPC_PORT_BINDING", "1")
    port = free_port()
    first, second = engines(initialized=False), engines(initialized=False)
    assert first.initialize(f"127.0.0.1:{port}", *GOOD[1:]) == 0
    assert first.get_rpc_port() == port
    assert second.initialize(f"127.0.0.1:{port}", *GOOD[1:]) == -1
    assert str(port) in second.last_error()


def test_the_topology_lists_what_is_near_each_memory() -> None:
    def place(node: int) -> Place:
        return Place((f"pci000{node}:00", f"000{node}:00:01.0"), node)

    topology = Topology(
        nodes={0: (10, 20), 1: (20, 10)},
        devices={"mlx5_0": place(0), "mlx5_1": place(1), "rxe0": Place((), -1)},
        gpus={"cuda:0": place(1)},
    )
    assert local_topology(topology, []) == {
        "cpu:0": [["mlx5_0"], ["mlx5_1", "rxe0"]],
        "cpu:1": [["mlx5_1"], ["mlx5_0", "rxe0"]],
        "cuda:0": [["mlx5_1"], ["mlx5_0", "rxe0"]],
    }
    assert local_topology(topology, ["mlx5_0"])["cpu:1"] == [["mlx5_0"], []]
    assert local_topology(Topology({}, {}, {}), []) == {"cpu:0": [[], []]}


def test_the_topology_is_told_before_initialization(engines: Engines) -> None:
    topology = json.loads(engines(initialized=False).get_local_topology())
    assert "cpu:0" in topology
    assert json.loads(TransferEngine().get_local_topology("no_such_device"))["cpu:0"] == [[], []]
