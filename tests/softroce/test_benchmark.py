"""The benchmark of RDMA measures what it says, if only for a moment."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "benchmarks/rdma.py"


def test_writes_and_reads_are_measured_beside_perftest(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ("--rounds=1", "--size=4", f"--json={figures}")
    ended = subprocess.run(
        [sys.executable, PROGRAM, *options], capture_output=True, text=True, timeout=100
    )
    assert ended.returncode == 0, ended.stderr
    found = {(one["name"], one["case"]): one for one in json.loads(figures.read_text())["figures"]}
    assert {(name, one["reference_name"]) for (name, _), one in found.items()} == {
        ("write", "ib_write_bw"),
        ("read", "ib_read_bw"),
        ("small writes", "ib_write_lat"),
    }
    assert all(one["value"] > 0 and one["reference"] > 0 for one in found.values())
    whole = found["write", "one buffer"]
    *_, last = ended.stdout.splitlines()
    assert float(last.rpartition(" ")[2]) == pytest.approx(whole["ratio"], abs=0.001)
