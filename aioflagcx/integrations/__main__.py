"""``python -m aioflagcx.integrations path``"""

from __future__ import annotations

import argparse
from pathlib import Path

SHIMS = Path(__file__).resolve().parent / "shims"


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(
        prog="python -m aioflagcx.integrations",
        description="aioflagcx in place of other projects' engines.",
    )
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    commands.add_parser(
        "path",
        help="print the folder for PYTHONPATH",
        description="Print the folder that, in front of PYTHONPATH, makes `mooncake.engine` and "
        "`plugin.interservice.flagcx_wrapper` this package's.",
    )
    parser.parse_args()
    print(SHIMS)


if __name__ == "__main__":
    main()
