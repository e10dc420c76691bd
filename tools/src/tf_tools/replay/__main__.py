"""``python -m tf_tools.replay``: 0 when nothing differs, 1 when something does, 2 for an error."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tf_tools.replay._diff import compare
from tf_tools.replay._dump import dump
from tf_tools.replay._other import ReplayError, dump_with, sources_of


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    parser = argparse.ArgumentParser(prog="python -m tf_tools.replay", description=__doc__)
    actions = parser.add_subparsers(dest="action", required=True)
    dumping = actions.add_parser("dump", help="write one file for each type")
    dumping.add_argument("folder", type=Path)
    dumping.add_argument("names", nargs="*", metavar="NAME")
    dumping.add_argument("--packages", type=Path, help="a folder that other releases of our packages are installed in")
    differing = actions.add_parser("diff", help="compare two dumps")
    differing.add_argument("old", type=Path)
    differing.add_argument("new", type=Path)
    against = actions.add_parser("against", help="compare with the sources of a commit")
    against.add_argument("commit")
    against.add_argument("names", nargs="*", metavar="NAME")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except Exception as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    if options.action == "dump":
        if options.packages is not None:
            dump_with([options.packages], options.folder, options.names)
        else:
            print(f"{dump(options.folder, options.names)} types in {options.folder}")
        return 0
    if options.action == "diff":
        for folder in (options.old, options.new):
            if not folder.is_dir():
                raise ReplayError(f"{folder} is no folder")
        return _show(options.old, options.new)
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch, sources_of(options.commit) as packages:
        old, new = Path(scratch, "old"), Path(scratch, "new")
        dump_with(packages, old, options.names)
        dump(new, options.names)
        return _show(old, new)


def _show(old: Path, new: Path) -> int:
    changes = list(compare(old, new))
    for change in changes:
        print(change.diff)
    print(f"{len(changes)} types differ" if changes else "nothing differs", file=sys.stderr)
    return 1 if changes else 0


if __name__ == "__main__":
    sys.exit(main())
