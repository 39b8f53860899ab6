"""Measures the soft device's paths, each figure beside a reference in the same run.

    make bench                                               # a table, in about six minutes
    python benchmarks/run.py --only latency,ticker --paths tcp
    python benchmarks/run.py --json figures.json --plot throughput.png

A machine's own speed cancels out in the ratios; the absolute values do not mean much on another
machine. What else it does cancels out only partly: an engine has more threads than a reference, so
a busy machine flatters it. `process` is a target engine in the same process, compared with memcpy.
The others are in another process: `local` is compared with process_vm_writev into ordinary memory,
`alloc`, into memory that the target's engine owns, with memcpy to shared memory, `tcp` with one
blocking stream: each a small C program, see benchmarks/raw. The goals are for a machine with idle
cores. The bar needs tqdm, --plot needs matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from pathlib import Path

from figures import Figure, plot, table
from measurements import MEASUREMENTS, OF_ALLOC, Setting
from targets import PATHS

import aioflagcx


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default=",".join(MEASUREMENTS), help="default: %(default)s")
    parser.add_argument("--paths", default=",".join(PATHS), help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=7, help="default: %(default)s")
    parser.add_argument(
        "--seconds", type=float, default=0.2, help="of a round; default: %(default)s"
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - is stdout")
    parser.add_argument("--plot", metavar="FILE", help="draw throughput by size there")
    arguments = parser.parse_args()
    names, paths = arguments.only.split(","), arguments.paths.split(",")
    for given, known, what in ((names, MEASUREMENTS, "measurement"), (paths, PATHS, "path")):
        if unknown := set(given) - set(known):
            parser.error(f"no such {what}: {', '.join(sorted(unknown))}")

    setting = Setting(arguments.rounds, arguments.seconds)
    try:
        figures = aioflagcx.run(measure(names, paths, setting))
    except FileNotFoundError as error:
        sys.exit(f"run.py: {error}")
    if arguments.json != "-":
        print(table(figures))
    if arguments.json:
        document = json.dumps(
            {
                "machine": {"cpus": os.cpu_count(), "platform": platform.platform()},
                "python": platform.python_version(),
                "setting": {"rounds": setting.rounds, "seconds": setting.seconds},
                "figures": [figure.as_json() for figure in figures],
            },
            indent=2,
        )
        if arguments.json == "-":
            print(document)
        else:
            Path(arguments.json).write_text(document + "\n")
    if arguments.plot:
        plot(figures, arguments.plot)


async def measure(names: list[str], paths: list[str], setting: Setting) -> list[Figure]:
    """All figures, while a bar shows what is being measured."""
    figures = []
    steps = [
        (name, path) for name in names for path in paths if path != "alloc" or name in OF_ALLOC
    ]
    with Steps(len(steps)) as progress:
        for name, path in steps:
            progress.begin(f"{name}, {path}")
            figures += [figure async for figure in MEASUREMENTS[name](path, setting)]
            progress.end()
    return figures


class Steps:
    """A progress bar on standard error where that is a terminal and tqdm is there."""

    def __init__(self, total: int) -> None:
        self._bar = None
        if sys.stderr.isatty():
            try:
                from tqdm import tqdm
            except ImportError:
                print("install tqdm to see a progress bar", file=sys.stderr)
            else:
                self._bar = tqdm(total=total, bar_format="{l_bar}{bar}| {n}/{total} [{elapsed}]")

    def __enter__(self) -> Steps:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def begin(self, what: str) -> None:
        if self._bar is not None:
            self._bar.set_description(what)

    def end(self) -> None:
        if self._bar is not None:
            self._bar.update()


if __name__ == "__main__":
    main()
