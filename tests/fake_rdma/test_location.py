"""Memory goes by the devices nearest to it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from fake_rdma.conftest import Gpu, GpuArray
from test_memory import Tensor
from test_topology import Host

from aioflagcx import Engine
from aioflagcx.errors import RegistrationError
from aioflagcx.topology import Topology

SIZE = 1 << 20


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fake0 and cuda:0 are at the first host bridge, fake1 and cuda:1 at the second."""
    host = Host(tmp_path)
    for node, distances in enumerate(("10 21", "21 10")):
        host.node(node, distances)
        bridge = f"pci0000:{node}0"
        host.gpu((bridge, f"0000:{node}0:01.0"), node)
        host.nic(f"fake{node}", (bridge, f"0000:{node}0:02.0"), node)
    topology = host.read()
    monkeypatch.setattr(Topology, "read", classmethod(lambda cls: topology))


@pytest.fixture
async def prefill() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        yield engine


@pytest.fixture
async def decode() -> AsyncIterator[Engine]:
    async with Engine() as engine:
        await engine.register(bytearray(SIZE), name="kv")
        yield engine


@pytest.mark.parametrize(
    ("location", "rails"),
    [
        ("cpu:0", {"fake0->fake0"}),
        ("cpu:1", {"fake1->fake1"}),
        ("cuda:1", {"fake1->fake1"}),
        (None, {"fake0->fake0", "fake1->fake1"}),
        ("*", {"fake0->fake0", "fake1->fake1"}),
    ],
)
async def test_transfers_take_the_nearest_devices(
    prefill: Engine, decode: Engine, location: str | None, rails: set[str]
) -> None:
    src = await prefill.register(bytes(SIZE), access="read", location=location)
    session = await prefill.connect(decode.session_id)
    moved: set[str] = set()
    count = 0
    while count < 20 or moved != rails:  # whoever is first may take all of a transfer
        await prefill.write(session, src, session.regions["kv"], SIZE)
        moved = {rail for rail, size in prefill.stats().rails.items() if size}
        assert moved <= rails
        count += 1


async def test_an_array_of_a_gpu_says_where_it_is(gpu: Gpu, prefill: Engine) -> None:
    class OnTheSecond(Tensor):
        def __dlpack_device__(self) -> tuple[int, int]:
            return 2, 1

    def on_gpu(*shape: Any) -> Tensor:
        tensor = OnTheSecond(shape, device=2)
        tensor._managed.tensor.data = gpu.alloc(SIZE)
        return tensor

    assert (await prefill.register(on_gpu(8, 8))).location == "cuda:1"
    assert (await prefill.register(on_gpu(8, 8), location="cuda:0")).location == "cuda:0"
    assert (await prefill.register(GpuArray(gpu.alloc(SIZE), SIZE))).location == "*"


async def test_a_place_that_is_not_here(prefill: Engine) -> None:
    with pytest.raises(RegistrationError, match=r"cuda:7.*has cpu:0, cpu:1, cuda:0, cuda:1"):
        await prefill.register(bytearray(64), location="cuda:7")
