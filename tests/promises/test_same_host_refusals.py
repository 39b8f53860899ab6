"""Where the kernel does not let one process copy into another, though both are on this host: data
goes by TCP, and the initiator's log says why. What is allowed goes by the same-host path.
"""

from __future__ import annotations

import ctypes
import encodings.idna  # noqa: F401  used by getaddrinfo(), and not readable any more for nobody
import logging
import os
import shutil
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from promises.host import Host
from promises.lab import Lab
from promises.measures import KiB, random_bytes
from promises.nursery import Nursery
from promises.two_hosts import TwoHosts

from aioflagcx.errors import ConnectError

pytestmark = [
    pytest.mark.netns,
    pytest.mark.arrangements("local-processes"),
]

SIZE = 256 * KiB
NOBODY = 65534
PR_SET_DUMPABLE = 4

Placement = dict[str, Any]


def become_nobody() -> None:
    """Another user, whose memory its other processes may reach."""
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)
    set_dumpable(1)  # which changing the user has cleared


def become_secretive_nobody() -> None:
    """Another user, whose memory is for root alone."""
    become_nobody()
    set_dumpable(0)


def set_dumpable(value: int) -> None:
    assert ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, value, 0, 0, 0) == 0


def unshare(*what: str) -> Placement:
    """A process in namespaces of its own."""
    command = shutil.which("unshare")
    if command is None or os.geteuid() != 0:
        pytest.fail("namespaces need root and util-linux")
    return {"command": (command, *what)}


NEW_PIDS = ("--pid", "--fork", "--kill-child")


async def connect_watched(host: Host, peer: str) -> tuple[str, list[str]]:
    """The path to the peer, and what was logged about it."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, handler = logging.getLogger("aioflagcx"), Keep()
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        session = await host.engine.connect(peer)
    finally:
        logger.removeHandler(handler)
    return session.path, lines


async def write_and_read(host: Host, peer: str, remote: int, size: int) -> None:
    """The first half of our memory goes there, and comes back into the second."""
    await host.engine.write(peer, host.base, remote, size)
    await host.engine.read(peer, host.base + size, remote, size)


async def path_between(
    lab: Lab, initiator: Placement, target: Placement, **settings: Any
) -> tuple[str, list[str]]:
    """The path that data has taken from the one to the other, both ways, and the log of it."""
    settings = {"soft_paths": ("local", "tcp"), **settings}
    owner = await lab.peer(SIZE, placement=target, **settings)
    ours = await lab.peer(2 * SIZE, placement=initiator, **settings)
    path, lines = await ours.run(connect_watched, owner.session_id)
    ours.memory[:SIZE] = random_bytes(SIZE, 1)
    await ours.run(write_and_read, owner.session_id, owner.at(0), SIZE)
    assert np.array_equal(owner.memory, ours.memory[:SIZE])
    assert np.array_equal(ours.memory[SIZE:], ours.memory[:SIZE])
    return path, lines


def as_user(nursery: Nursery, prepare: Callable[[], None] | None) -> Placement:
    return {"nursery": nursery} if prepare is None else {"nursery": nursery, "prepare": prepare}


@pytest.mark.parametrize(
    ("initiator", "target", "reason"),
    [
        pytest.param(
            become_nobody,
            become_secretive_nobody,
            "the kernel does not permit to copy into the peer: it is not dumpable",
            id="not-dumpable",
        ),
        pytest.param(
            None, become_nobody, f"it runs as user {NOBODY}, this process as 0", id="root-to-user"
        ),
        pytest.param(
            become_nobody, None, f"it runs as user 0, this process as {NOBODY}", id="user-to-root"
        ),
    ],
)
async def test_a_process_that_may_not_be_copied_into_is_reached_by_tcp_and_the_log_says_why(
    lab: Lab,
    nursery: Nursery,
    initiator: Callable[[], None] | None,
    target: Callable[[], None] | None,
    reason: str,
) -> None:
    path, lines = await path_between(lab, as_user(nursery, initiator), as_user(nursery, target))
    assert path == "tcp"
    [note] = [line for line in lines if "same-host path" in line]
    assert "soft0->soft0 goes by tcp" in note
    assert reason in note


async def test_two_processes_of_an_ordinary_user_copy(lab: Lab, nursery: Nursery) -> None:
    placement = as_user(nursery, become_nobody)
    path, lines = await path_between(lab, placement, placement)
    assert path == "local"
    assert not any("same-host path" in line for line in lines)


async def test_the_permission_is_one_way(lab: Lab, nursery: Nursery) -> None:
    """Who hides its own memory may copy into another's."""
    path, _ = await path_between(
        lab, as_user(nursery, become_secretive_nobody), as_user(nursery, become_nobody)
    )
    assert path == "local"


@pytest.mark.parametrize(
    ("initiator", "target", "reason"),
    [
        pytest.param((), NEW_PIDS, "a PID namespace that this process is not in", id="target"),
        pytest.param(NEW_PIDS, (), "it is in another PID namespace", id="initiator"),
    ],
)
async def test_another_pid_namespace_is_reached_by_tcp(
    lab: Lab, initiator: tuple[str, ...], target: tuple[str, ...], reason: str
) -> None:
    """Each side must see the other's process, to know when it has ended."""
    placements = [unshare(*what) if what else {} for what in (initiator, target)]
    path, lines = await path_between(lab, *placements)
    assert path == "tcp"
    assert any(reason in line for line in lines), lines


async def test_two_processes_in_one_foreign_pid_namespace_copy(lab: Lab) -> None:
    owner = await lab.peer(SIZE, placement=unshare(*NEW_PIDS))
    inside = {"command": ("nsenter", "--target", str(child_of(owner.process.pid)), "--pid")}
    writer = await lab.peer(2 * SIZE, placement=inside)
    path, _ = await writer.run(connect_watched, owner.session_id)
    assert path == "local"
    writer.memory[:SIZE] = 7
    await writer.run(write_and_read, owner.session_id, owner.at(0), SIZE)
    assert (owner.memory == 7).all()
    assert (writer.memory == 7).all()


def child_of(pid: int) -> int:
    with open(f"/proc/{pid}/task/{pid}/children") as children:
        return int(children.read())


async def test_another_user_namespace_is_reached_by_tcp(lab: Lab) -> None:
    """Whoever is root in there has no rights out here."""
    path, lines = await path_between(lab, unshare("--user", "--map-root-user"), {})
    assert path == "tcp"
    assert any("the kernel does not permit to copy" in line for line in lines), lines


async def test_another_network_namespace_is_reached_by_tcp(lab: Lab, two_hosts: TwoHosts) -> None:
    """Abstract Unix sockets belong to one, as containers on one host have."""
    path, lines = await path_between(lab, two_hosts.placement(0), two_hosts.placement(1))
    assert path == "tcp"
    assert any("in another network namespace" in line for line in lines), lines


async def test_another_mount_namespace_makes_no_difference(lab: Lab) -> None:
    path, _ = await path_between(lab, unshare("--mount"), unshare("--mount"))
    assert path == "local"


async def test_when_no_other_path_is_allowed_a_refusal_is_an_error_with_reason_and_remedy(
    lab: Lab, nursery: Nursery
) -> None:
    owner = await lab.peer(SIZE, placement=as_user(nursery, become_secretive_nobody))
    writer = await lab.peer(SIZE, placement=as_user(nursery, become_nobody))
    with pytest.raises(ConnectError) as refused:
        await writer.run(connect_watched, owner.session_id)
    assert refused.value.peer == owner.session_id
    message = str(refused.value)
    assert "it is not dumpable (PR_SET_DUMPABLE)" in message
    assert "soft_paths" in message
    # The target is as good as before, for whoever may reach it.
    root = await lab.peer(SIZE, placement={"nursery": nursery}, soft_paths=("tcp",))
    with pytest.raises(ConnectError):  # they have no path in common
        await root.run(connect_watched, owner.session_id)
    await owner.run(Host.wait_responders, 0)


async def test_a_process_that_begins_to_hide_is_reached_by_tcp_from_then_on(
    lab: Lab, nursery: Nursery
) -> None:
    """Copies that worked begin to fail: the session goes on by another path."""
    placement = as_user(nursery, become_nobody)
    settings = {"soft_paths": ("local", "tcp")}
    owner = await lab.peer(SIZE, placement=placement, **settings)
    writer = await lab.peer(2 * SIZE, placement=placement, **settings)
    path, _ = await writer.run(connect_watched, owner.session_id)
    assert path == "local"
    await owner.run(hide)
    writer.memory[:SIZE] = random_bytes(SIZE, 2)
    await writer.run(write_and_read, owner.session_id, owner.at(0), SIZE)
    assert np.array_equal(owner.memory, writer.memory[:SIZE])
    path, _ = await writer.run(connect_watched, owner.session_id)
    assert path == "tcp"


async def hide(_: Host) -> None:
    set_dumpable(0)


@pytest.mark.parametrize("allow", [True, False])
async def test_allow_ptrace_is_harmless_where_yama_does_not_ask_for_it(
    lab: Lab, nursery: Nursery, allow: bool
) -> None:
    placement = as_user(nursery, become_nobody)
    path, _ = await path_between(lab, placement, placement, allow_ptrace=allow)
    assert path == "local"
