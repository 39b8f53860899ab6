from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aioflagcx.cli import main
from aioflagcx.topology import Topology

Bridges = tuple[str, ...]


class Host:
    """A sysfs tree made of files and links, as the kernel lays it out."""

    def __init__(self, root: Path) -> None:
        self.root = root
        (root / "sys/bus/pci/devices").mkdir(parents=True)
        (root / "sys/class/infiniband").mkdir(parents=True)

    def node(self, number: int, distances: str) -> None:
        folder = self.root / f"sys/devices/system/node/node{number}"
        folder.mkdir(parents=True)
        (folder / "distance").write_text(f"{distances}\n")

    def pci(self, path: Bridges, node: int, kind: str, vendor: str) -> Path:
        folder = self.root.joinpath("sys/devices", *path)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{node}\n")
        (folder / "class").write_text(f"{kind}\n")
        (folder / "vendor").write_text(f"{vendor}\n")
        (self.root / "sys/bus/pci/devices" / path[-1]).symlink_to(folder)
        return folder

    def gpu(self, path: Bridges, node: int, uuid: str = "") -> None:
        self.pci(path, node, "0x030200", "0x10de")
        information = self.root / "proc/driver/nvidia/gpus" / path[-1] / "information"
        information.parent.mkdir(parents=True)
        information.write_text(f"Model: \t\t NVIDIA H100\nGPU UUID: \t {uuid}\n")

    def nic(self, name: str, path: Bridges, node: int) -> None:
        hardware = self.pci(path, node, "0x020700", "0x15b3")
        folder = hardware / "infiniband" / name
        folder.mkdir(parents=True)
        (folder / "device").symlink_to("../..")
        (self.root / "sys/class/infiniband" / name).symlink_to(folder)

    def read(self, **environ: str) -> Topology:
        return Topology.read(self.root, environ)


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


@pytest.fixture
def eight(host: Host) -> Host:
    """Two NUMA nodes with two host bridges each; below a bridge two switches, each with a GPU and
    a NIC."""
    host.node(0, "10 21")
    host.node(1, "21 10")
    for number in range(8):
        bridge, port = divmod(number, 2)
        node = number // 4
        bus = 0x10 + 0x20 * bridge + 8 * port
        switch = (
            f"pci0000:{0x10 + 0x20 * bridge:02x}",
            f"0000:{0x10 + 0x20 * bridge:02x}:{port + 1:02x}.0",
            f"0000:{bus + 1:02x}:00.0",
        )
        host.gpu((*switch, f"0000:{bus + 2:02x}:00.0", f"0000:{bus + 3:02x}:00.0"), node)
        nic = (*switch, f"0000:{bus + 2:02x}:01.0", f"0000:{bus + 4:02x}:00.0")
        host.nic(f"mlx5_{number}", nic, node)
    return host


NICS = [f"mlx5_{number}" for number in range(8)]


def test_each_gpu_has_the_nic_of_its_switch(eight: Host) -> None:
    topology = eight.read()
    assert topology.locations == ["cpu:0", "cpu:1", *(f"cuda:{number}" for number in range(8))]
    for number in range(8):
        assert topology.nearest(f"cuda:{number}", NICS) == [f"mlx5_{number}"]
    words = [topology.distance("cuda:5", name) for name in NICS]
    assert words == ["SYS", "SYS", "SYS", "SYS", "PHB", "PIX", "NODE", "NODE"]


def test_each_numa_node_has_its_own(eight: Host) -> None:
    topology = eight.read()
    assert topology.nearest("cpu:0", NICS) == NICS[:4]
    assert topology.nearest("cpu:1", NICS) == NICS[4:]


def test_of_the_devices_of_an_engine_the_nearest_are_taken(eight: Host) -> None:
    topology = eight.read()
    assert topology.nearest("cuda:5", ["mlx5_0", "mlx5_4", "mlx5_6"]) == ["mlx5_4"]
    assert topology.nearest("cuda:5", ["mlx5_0", "mlx5_6", "mlx5_7"]) == ["mlx5_6", "mlx5_7"]
    assert topology.nearest("cuda:5", ["mlx5_0", "mlx5_1"]) == ["mlx5_0", "mlx5_1"]
    assert topology.nearest("cuda:5", ["mlx5_4:2", "mlx5_5:2"]) == ["mlx5_5:2"]
    assert topology.nearest("*", NICS) == []
    assert topology.nearest("cuda:99", ["soft0"]) == []


def test_of_two_levels_of_switches_the_inner_is_nearer(host: Host) -> None:
    host.node(0, "10")
    outer = ("pci0000:00", "0000:00:01.0", "0000:01:00.0")
    inner = (*outer, "0000:02:00.0", "0000:03:00.0")
    host.gpu((*inner, "0000:04:00.0", "0000:05:00.0"), 0)
    host.nic("mlx5_0", (*outer, "0000:02:01.0", "0000:06:00.0"), 0)
    host.nic("mlx5_1", (*inner, "0000:04:01.0", "0000:07:00.0"), 0)
    topology = host.read()
    assert [topology.distance("cuda:0", f"mlx5_{i}") for i in range(2)] == ["PXB", "PIX"]
    assert topology.nearest("cuda:0", ["mlx5_0", "mlx5_1"]) == ["mlx5_1"]


def test_of_other_numa_nodes_the_nearest_counts(host: Host) -> None:
    for node, distances in enumerate(("10 12 32", "12 10 32", "32 32 10")):
        host.node(node, distances)
    host.nic("mlx5_0", ("pci0000:80", "0000:80:01.0"), 2)
    host.nic("mlx5_1", ("pci0000:40", "0000:40:01.0"), 1)
    assert host.read().nearest("cpu:0", ["mlx5_0", "mlx5_1"]) == ["mlx5_1"]


def test_on_a_host_with_one_numa_node_all_are_alike(host: Host) -> None:
    host.node(0, "10")
    host.nic("mlx5_0", ("pci0000:00", "0000:00:01.0"), -1)
    host.nic("mlx5_1", ("pci0000:40", "0000:40:01.0"), -1)
    assert host.read().nearest("cpu:0", ["mlx5_0", "mlx5_1"]) == ["mlx5_0", "mlx5_1"]


def test_a_software_device_is_where_its_network_card_is(host: Host) -> None:
    host.node(0, "10 21")
    host.node(1, "21 10")
    card = host.pci(("pci0000:40", "0000:40:01.0"), 1, "0x020000", "0x8086")
    interface = card / "net/eth1"
    interface.mkdir(parents=True)
    (interface / "device").symlink_to("../..")
    (host.root / "sys/class/net").mkdir()
    (host.root / "sys/class/net/eth1").symlink_to(interface)
    for name, parent in (("rxe0", "eth1"), ("rxe1", "lo")):
        folder = host.root / "sys/devices/virtual/infiniband" / name
        folder.mkdir(parents=True)
        (folder / "parent").write_text(f"{parent}\n")
        (host.root / "sys/class/infiniband" / name).symlink_to(folder)
    topology = host.read()
    assert topology.devices["rxe0"].address == "0000:40:01.0"
    assert topology.devices["rxe1"].address is None
    assert topology.nearest("cpu:1", ["rxe0", "rxe1"]) == ["rxe0"]
    assert topology.nearest("cpu:0", ["rxe0", "rxe1"]) == ["rxe0"]


def test_other_display_devices_and_vendors_are_no_gpus(host: Host) -> None:
    host.pci(("pci0000:00", "0000:00:02.0"), 0, "0x030000", "0x8086")
    host.pci(("pci0000:00", "0000:00:03.0"), 0, "0x040300", "0x10de")  # a GPU's sound
    assert host.read().gpus == {}


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("1,0", ["0000:00:02.0", "0000:00:01.0"]),
        ("1", ["0000:00:02.0"]),
        ("GPU-bb", ["0000:00:02.0"]),
        ("GPU-bb22,GPU-aa11", ["0000:00:02.0", "0000:00:01.0"]),
        ("0,7,1", ["0000:00:01.0"]),  # CUDA stops at the first that is none
        ("-1", []),
        ("", []),
    ],
)
def test_gpus_have_the_numbers_that_this_process_sees(
    host: Host, setting: str, found: list[str]
) -> None:
    host.gpu(("pci0000:00", "0000:00:01.0"), 0, "GPU-aa11")
    host.gpu(("pci0000:00", "0000:00:02.0"), 0, "GPU-bb22")
    gpus = host.read(CUDA_VISIBLE_DEVICES=setting).gpus
    assert [gpu.address for gpu in gpus.values()] == found
    assert list(gpus) == [f"cuda:{number}" for number in range(len(found))]


@pytest.mark.parametrize("location", ["", "cuda", "cpu:-1", "cuda:01", "gpu:0", "cpu:0 ", None, 0])
def test_what_is_no_location(eight: Host, location: Any) -> None:
    with pytest.raises(ValueError, match='accepted are "cpu:N"'):
        eight.read().nearest(location, NICS)


def test_a_location_that_is_not_here_is_told_with_those_that_are(eight: Host) -> None:
    with pytest.raises(ValueError, match=r"'cuda:8' is not on this host.*cpu:1, cuda:0.*cuda:7"):
        eight.read().nearest("cuda:8", NICS)


def test_the_table(eight: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--root", str(eight.root)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["node", *NICS, "nearest"]
    rows = {line.split()[0]: line.split()[1:] for line in lines[1:]}
    assert len(rows) == 10
    assert rows["cpu:1"] == ["1", *["SYS"] * 4, *["NODE"] * 4, "mlx5_4,mlx5_5,mlx5_6,mlx5_7"]
    assert rows["cuda:0"] == ["0", "PIX", "PHB", "NODE", "NODE", *["SYS"] * 4, "mlx5_0"]
    assert len({len(line.rsplit("mlx5_", 1)[0]) for line in lines[3:]}) == 1  # in columns


def test_the_json(eight: Host, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["topology", "--json", "--root", str(eight.root)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["nodes"] == [0, 1]
    assert [nic["name"] for nic in found["devices"]] == NICS
    assert found["gpus"][7] == {"name": "cuda:7", "pci": "0000:7b:00.0", "node": 1}
    assert found["distances"]["cuda:7"]["mlx5_7"] == "PIX"
    assert found["nearest"]["cuda:7"] == ["mlx5_7"]


def test_the_command_runs_on_this_host() -> None:
    command = Path(sys.executable).with_name("aioflagcx")
    shown = subprocess.run([command, "topology", "--json"], capture_output=True, text=True)
    assert shown.returncode == 0, shown.stderr
    assert set(json.loads(shown.stdout)) == {"nodes", "devices", "gpus", "distances", "nearest"}
    plain = subprocess.run([command, "topology"], capture_output=True, text=True)
    assert plain.returncode == 0 and plain.stdout


def test_a_host_without_rdma_devices_says_so(
    host: Host, capsys: pytest.CaptureFixture[str]
) -> None:
    main(["topology", "--root", str(host.root)])
    assert "no RDMA devices" in capsys.readouterr().out
