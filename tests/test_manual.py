"""What the manual shows runs as it is shown."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROGRAMS = [
    program
    for page in ("usage", "kv", "integrations")
    for program in re.findall(
        r"```python\n(.*?)```", (ROOT / f"docs/{page}.md").read_text(), re.DOTALL
    )
]


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_programs_in_the_manual_run(program: str) -> None:
    if sys.version_info < (3, 11):
        program = program.replace("asyncio.timeout(5)", "contextlib.AsyncExitStack()")
        program = "import contextlib\n" + program
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", program], capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""


def test_every_link_of_the_manual_leads_somewhere() -> None:
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)]+)\)", page.read_text()):
            path, _, anchor = target.partition("#")
            there = (page.parent / path) if path else page
            assert there.exists(), f"{page.name}: {target}"
            if anchor:
                assert anchor in anchors_of(there), f"{page.name}: {target}"


def anchors_of(page: Path) -> set[str]:
    """What a page's headings can be linked by."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", title).lower().replace(" ", "-") for title in titles}
