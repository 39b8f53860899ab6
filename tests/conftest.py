"""What every test may count on."""

from __future__ import annotations

import gc
import signal

import pytest
from conformance.devices import missing_devices

# A program that was started in the background of a shell without job control ignores SIGINT, and so
# do its children; tests of what Ctrl-C does would wait for it in vain.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="module")
def heap_of_its_own() -> None:
    """Python's collector looks at what a module's tests make, and no longer at what is left of
    others: of thousands of tests, that takes it a quarter of a second, whichever test it falls
    into, and those that measure the event loop take it for theirs."""
    gc.collect()
    gc.freeze()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("devices")
    group.addoption(
        "--rdma",
        metavar="NEAR,FAR",
        help="two RDMA devices of this host that reach each other: tests/conformance runs on them "
        "instead of the soft device",
    )
    group.addoption(
        "--emulated",
        action="store_true",
        help="this machine is emulated: tests give everything ten times as long, and transfers "
        "have at most 64 MiB",
    )


def pytest_configure(config: pytest.Config) -> None:
    rdma = config.getoption("rdma")
    if rdma is None:
        return
    if rdma.count(",") != 1:
        raise pytest.UsageError(f"--rdma {rdma}: give two devices, with a comma between them")
    if missing := missing_devices(rdma):
        raise pytest.UsageError(f"--rdma {rdma}: there is no RDMA device {', '.join(missing)} here")


def pytest_collection_finish(session: pytest.Session) -> None:
    if not (rdma := session.config.getoption("rdma")):
        return
    callspecs = [getattr(item, "callspec", None) for item in session.items]
    if not any(spec and spec.params.get("devices") == rdma for spec in callspecs):
        raise pytest.UsageError(f"--rdma {rdma}: none of these tests runs on it")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Whoever names the devices has them, so no test has a reason to be skipped."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if session.config.getoption("rdma") and reporter and reporter.stats.get("skipped"):
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED
