"""Measures RDMA between two devices of this machine, beside a plain copy of its memory.

    make bench-softroce                                     # in a guest with Soft-RoCE devices
    python benchmarks/rdma.py --json figures.json       # where there are such devices

Under emulation the figures mean little by themselves; they say what to compare others of the same
guest with.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from figures import Figure, table
from perftest import bandwidth
from references import memcpy

MIB = 1 << 20
SIZES = {"4 KiB": 4 << 10, "64 KiB": 64 << 10, "1 MiB": MIB}
PROGRAMS = {"write": "ib_write_bw", "read": "ib_read_bw"}
BYTES = 64 * MIB
"""Moved in a round, whatever the size of one request."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="rxe0", help="default: %(default)s")
    parser.add_argument("--target", default="rxe1", help="its peer; default: %(default)s")
    parser.add_argument("--rounds", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", metavar="FILE", help="write all figures there; - is stdout")
    arguments = parser.parse_args()

    figures = []
    for operation, program in PROGRAMS.items():
        for case, size in SIZES.items():
            values, references = [], []
            for _ in range(arguments.rounds):
                count = BYTES // size
                moved = bandwidth(program, arguments.device, arguments.target, size, count)
                values.append(moved)
                copied = memcpy(size, seconds=0.5)
                references.append(copied.count * size / MIB / copied.seconds)
            figures.append(
                Figure.of(
                    operation, "perftest", case, "MiB/s", values, references, "memcpy", size
                )
            )  # fmt: skip
    if arguments.json != "-":
        print(table(figures))
    if arguments.json:
        document = json.dumps({"figures": [figure.as_json() for figure in figures]}, indent=2)
        if arguments.json == "-":
            print(document)
        else:
            Path(arguments.json).write_text(document + "\n")


if __name__ == "__main__":
    main()
