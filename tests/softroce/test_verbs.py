"""The native tests of what verbs.h promises, on the guest's devices: tests/native/verbs_*.cpp."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "build/native/aioflagcx_verbs_tests"
"""Made by make."""
DEVICES = {"AIOFLAGCX_TEST_RDMA": "rxe0,rxe1"}


def program(*options: str) -> str:
    """What the program says. Raises AssertionError with that if it fails."""
    done = subprocess.run(
        [PROGRAM, *options], capture_output=True, text=True, env={**os.environ, **DEVICES}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def promises() -> list[str]:
    """The names of the tests that run on these devices."""
    suite, names = "", []
    for line in program("--gtest_list_tests").splitlines():
        name = line.split()[0]
        if line.startswith(" "):
            assert name.endswith("/rdma"), name
            names.append(suite + name)
        elif re.fullmatch(r"\w+\.", name):
            suite = name
    assert names, "the program has none of these tests"
    return names


@pytest.mark.parametrize("promise", promises())
def test_a_promise_of_verbs(promise: str) -> None:
    assert "[  PASSED  ] 1 test." in program(f"--gtest_filter={promise}")
