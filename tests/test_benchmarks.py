"""The benchmarks measure what they say, if only for a moment each."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
RAW = ROOT / "build/raw"


@pytest.fixture(scope="module", autouse=True)
def built() -> None:
    subprocess.run(["make", "build/raw/copy", "build/raw/stream"], cwd=ROOT, check=True)


def run(*command: str | Path, orders: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, input=orders, capture_output=True, text=True, timeout=100, check=False
    )


@pytest.mark.parametrize(
    ("program", "methods", "cases"), [("copy", {"writev", "memcpy"}, 5), ("stream", {"stream"}, 3)]
)
def test_a_raw_program_measures_by_itself(program: str, methods: set[str], cases: int) -> None:
    ended = run(RAW / program, "2", "0.001")
    assert (ended.returncode, ended.stderr) == (0, "")
    figures = json.loads(ended.stdout)
    assert len({(one["method"], one["case"]) for one in figures}) == len(methods) * cases
    assert {one["method"] for one in figures} == methods
    for one in figures:
        assert 0 < one["median_gib_per_second"] <= one["best_gib_per_second"]


@pytest.mark.parametrize(
    ("program", "orders"),
    [
        ("copy", ["writev 4096 1", "writev 67108864 4096", "memcpy 1048576 3", "memcpy 4096 1"]),
        ("stream", ["4096", "1048576", "1"]),
    ],
)
def test_a_raw_program_answers_each_order(program: str, orders: list[str]) -> None:
    ended = run(RAW / program, "--serve", orders="".join(f"{order} 0.01\n" for order in orders))
    assert (ended.returncode, ended.stderr) == (0, "")
    timings = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(timings) == len(orders)
    for timing in timings:
        assert timing["count"] >= 1
        assert timing["seconds"] >= 0.01
        assert 0 <= timing["p50"] <= timing["p99"] <= timing["p999"]


@pytest.mark.parametrize(
    ("program", "order"),
    [
        ("copy", "sendfile 4096 1 1"),
        ("copy", "writev 1000000000 1 1"),
        ("copy", "memcpy 4096 0 1"),
        ("copy", "nonsense"),
        ("stream", "1000000000 1"),
    ],
)
def test_an_order_that_cannot_be_ends_it_with_an_error(program: str, order: str) -> None:
    ended = run(RAW / program, "--serve", orders=order + "\n")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "Invalid argument" in ended.stderr


def test_each_path_is_measured_beside_its_reference() -> None:
    ended = run(
        sys.executable,
        ROOT / "benchmarks/run.py",
        "--only=throughput,latency",
        "--rounds=1",
        "--seconds=0.001",
        "--json=-",
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    figures = json.loads(ended.stdout)["figures"]
    assert {one["path"] for one in figures} == {"process", "local", "alloc", "tcp"}
    for one in figures:
        assert one["value"] > 0
        assert one["ratio"] == pytest.approx(one["value"] / one["reference"])
        judged = one["least_ratio"] is not None or one["most"] is not None
        assert (one["goal_met"] is not None) == judged
    scattered = [one for one in figures if one["case"] == "4,096 x 16 KiB"]
    assert [(one["path"], one["least_ratio"]) for one in scattered] == [
        ("process", None),
        ("local", 0.95),
        ("alloc", 0.9),
        ("tcp", 1.0),
    ]
