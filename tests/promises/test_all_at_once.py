"""The promises together: while transfers come and go, so does everything else."""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import KiB, MiB

from aioflagcx.errors import (
    AioFlagcxError,
    ConnectError,
    DeregisterTimeout,
    RemoteAddressError,
    TransferError,
)

LANE = 2 * MiB
SECONDS = 5.0


@pytest.mark.arrangements("process", "process-threads", "local-processes", "tcp", "tcp-processes")
@pytest.mark.parametrize("seed", [1, 2])
async def test_nothing_hangs_and_no_success_is_false_while_all_kinds_of_things_happen(
    lab: Lab, seed: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Writes and reads, many of them stopped, between engines that quiesce, close sessions and
    deregister memory all the while.

    Each lane of the peer's memory belongs to one task. After a success every byte of it is
    right at once and stays so, which shows bytes of earlier, stopped writes that come late.
    """
    lanes, timeout = 6, 10.0
    settings = {"drain_timeout": 0.05, "connect_timeout": 5.0, "retry_count": 7}
    engine, peer = await lab.engine(**settings), await lab.peer(lanes * LANE, **settings)
    ours = np.zeros(2 * lanes * LANE, np.uint8)
    region = await engine.register(ours)
    end = time.monotonic() + SECONDS
    outcomes: dict[str, int] = {}

    async def lane(index: int) -> None:
        rng = np.random.default_rng((seed, index))
        theirs = peer.memory[index * LANE : (index + 1) * LANE]
        source = region.addr + index * LANE
        mine = ours[index * LANE : (index + 1) * LANE]
        back_at = region.addr + (lanes + index) * LANE
        back = ours[(lanes + index) * LANE : (lanes + index + 1) * LANE]
        value = 0
        while time.monotonic() < end:
            value = value % 250 + 1
            mine[:] = value
            size = int(rng.choice([1, 4 * KiB, 300_001, LANE]))
            pieces = np.unique(rng.integers(0, size, int(rng.integers(1, 50))))
            pieces[0] = 0
            lens = np.diff(np.append(pieces, size))
            transfer = engine.submit_write(
                peer.session_id,
                source + pieces,
                peer.at(index * LANE) + pieces,
                lens,
                timeout=timeout if rng.integers(3) else float(rng.uniform(0.0005, 0.01)),
            )
            if not rng.integers(3):
                delay = float(rng.uniform(0, 0.005))
                asyncio.get_running_loop().call_later(delay, transfer.cancel)
            outcome = await settled(transfer)
            mine[:] = 255  # must never arrive
            if outcome != "success":
                if not transfer.remote_quiet:
                    await peer.run(Host.quiesce, engine.session_id)
                theirs[:] = 0
                continue
            assert (theirs[:size] == value).all(), "success, but not every byte is there"
            reading = engine.submit_read(
                peer.session_id, back_at, peer.at(index * LANE), size, timeout=timeout
            )
            if await settled(reading) == "success":
                assert (back[:size] == value).all(), "read, but not every byte is here"
            assert (theirs[:size] == value).all(), "a byte came late"

    async def settled(transfer: asyncio.Future[int]) -> str:
        """How it ended, in time."""
        name = "success"
        try:
            await asyncio.wait_for(asyncio.shield(ended(transfer)), timeout + 2)
        except (TransferError, ConnectError, RemoteAddressError) as error:
            name = type(error).__name__
        outcomes[name] = outcomes.get(name, 0) + 1
        return name

    async def ended(transfer: asyncio.Future[int]) -> int:
        return await transfer

    async def disturb() -> None:
        rng = np.random.default_rng((seed, 99))
        extra = np.zeros(MiB, np.uint8)
        while time.monotonic() < end:
            await asyncio.sleep(float(rng.uniform(0, 0.05)))  # at any moment
            match int(rng.integers(4)):
                case 0:
                    await peer.run(Host.quiesce, engine.session_id)
                case 1:
                    with contextlib.suppress(ConnectError):
                        await (await engine.connect(peer.session_id)).close()
                case 2:
                    extra_region = await engine.register(extra)
                    write = engine.submit_write(
                        peer.session_id, extra_region, peer.at(0), 0, timeout=timeout
                    )
                    with contextlib.suppress(DeregisterTimeout):
                        await engine.deregister(extra_region, timeout=0.01)
                    with contextlib.suppress(AioFlagcxError):
                        await write
                case 3:
                    await peer.run(Host.deregister, "memory")
                    await peer.run(Host.register, "memory", 0, lanes * LANE)

    await asyncio.gather(disturb(), *(lane(index) for index in range(lanes)))
    print(seed, outcomes)
    assert outcomes["success"] > 20
    assert len(outcomes) > 3, "not much happened"
    assert "ProtocolError" not in outcomes, "both sides speak the protocol"
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []
    assert engine.stats().transfers_pending == 0
    # And afterwards all is as ever.
    ours[:] = 254
    session = await lab.connect(engine, peer)
    await session.refresh()
    assert await engine.write(session, region.addr, peer.at(0), lanes * LANE) == lanes * LANE
    assert (peer.memory == 254).all()


async def test_engines_that_connect_to_each_other_at_once_never_collide(lab: Lab) -> None:
    """Each session has its own direction: both work, whoever was first."""
    peer = await lab.peer(KiB)
    for round_ in range(1, 11):
        engine = await lab.engine()
        memory = np.zeros(KiB, np.uint8)
        region = await engine.register(memory)
        source = await engine.register(np.full(KiB, round_, np.uint8))
        theirs = asyncio.ensure_future(
            peer.run(write_here, engine.session_id, region.addr, KiB, 100 + round_)
        )
        write = engine.write(peer.session_id, source, peer.at(0), source, notify=("x", b""))
        results = await asyncio.gather(write, theirs, return_exceptions=True)
        assert results == [KiB, KiB]
        assert (memory == 100 + round_).all()


async def write_here(host: Host, peer: str, destination: int, size: int, value: int) -> int:
    """From other memory than what is being written to meanwhile."""
    source = await host.engine.register(np.full(size, value, np.uint8))
    return await host.engine.write(peer, source, destination, size)


async def test_a_hundred_engines_connect_to_one_at_once(lab: Lab) -> None:
    count = 100
    peer = await lab.peer(count * KiB)
    engines = [await lab.engine() for _ in range(count)]

    async def use(index: int) -> None:
        region = await engines[index].register(np.full(KiB, index, np.uint8))
        await engines[index].write(peer.session_id, region, peer.at(index * KiB), region)

    await asyncio.gather(*(use(index) for index in range(count)))
    assert await peer.run(Host.responders) == count
    expected = np.repeat(np.arange(count, dtype=np.uint8), KiB)
    assert np.array_equal(peer.memory, expected)
