"""The command ``aioflagcx``."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from .kv import bootstrap
from .topology import Topology

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``arguments``, by default the process's; its exit status."""
    options = _parser().parse_args(arguments)
    status: int = options.run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="aioflagcx", description=__doc__)
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    topology = commands.add_parser(
        "topology",
        help="which RDMA devices are next to which memory",
        description="For each NUMA node and GPU of this host, how far each RDMA device is, in the "
        "words of nvidia-smi topo, and which are nearest: those that transfers from and to memory "
        "registered with this location take.",
    )
    topology.add_argument("--json", action="store_true", help="as JSON")
    topology.add_argument(
        "--root",
        type=Path,
        default=Path("/"),
        metavar="DIR",
        help="look below DIR/sys, a copy of another host's, instead of /sys",
    )
    topology.set_defaults(run=_topology)
    bootstrap.add_command(commands)
    return parser


def _topology(options: argparse.Namespace) -> int:
    topology = Topology.read(options.root)
    print(json.dumps(topology.to_json(), indent=2) if options.json else topology.to_table())
    return 0
