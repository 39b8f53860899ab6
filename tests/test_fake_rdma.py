"""RDMA engines in Python without a NIC or a GPU: tests/fake_rdma, with the libraries of tests/fakes
in place of libibverbs and libcuda."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
FAKES = ROOT / "build/fakes"


def test_with_a_fake_nic_and_a_fake_gpu() -> None:
    for library in ("libibverbs.so.1", "libcuda.so.1"):
        assert (FAKES / library).exists(), f"{library} is missing: make build/fakes/{library}"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/fake_rdma"],
        cwd=ROOT,
        env=os.environ | {"LD_LIBRARY_PATH": str(FAKES)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
