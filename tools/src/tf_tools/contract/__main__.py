"""``python -m tf_tools.contract``: check our uses of vLLM against builds of it, or record what a build has."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tf_tools.contract._check import check_claims, check_ledgers, check_surface
from tf_tools.contract._claims import CLAIMS
from tf_tools.contract._collect import Uses, collect, sources
from tf_tools.contract._errors import ContractError
from tf_tools.contract._report import print_differences, print_ledgers, print_problems, print_uses
from tf_tools.contract._surface import data_folder, dumps, file_name, recorded
from tf_tools.contract._survey import survey
from tf_tools.contract._tree import from_installed
from tf_tools.contract._wheel import open_wheel

_WIDTH = 180
"""Columns of a report that goes to a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0 when the contract holds, 1 when it does not, 2 when it cannot be checked."""
    parser = argparse.ArgumentParser(prog="python -m tf_tools.contract", description=__doc__)
    parser.add_argument("action", nargs="?", choices=("check", "record"), default="check")
    parser.add_argument("--wheel", nargs="+", default=[], metavar="FILE_OR_VERSION", help="wheels of vLLM to read")
    parser.add_argument("--packages", type=Path, default=_packages(), help="folder of the packages that use vLLM")
    parser.add_argument("--quiet", action="store_true", help="print problems alone")
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    try:
        if options.action == "record" and not options.wheel:
            raise ContractError("say which wheel to record: --wheel 0.33.0, or a file")
        uses = collect(sources(options.packages))
        if options.action == "record":
            return _record(console, uses, options.wheel)
        return _check(console, uses, options)
    except ContractError as error:
        console.print(f"[red]{error}[/red]", markup=True)
        return 2


def _packages() -> Path:
    return Path(__file__).resolve().parents[4] / "packages"


def _record(console: Console, uses: Uses, wheels: Sequence[str]) -> int:
    for wheel in wheels:
        surface = survey(open_wheel(wheel), uses.uses, CLAIMS)
        file = data_folder() / file_name(surface)
        file.parent.mkdir(exist_ok=True)
        file.write_text(dumps(surface))
        console.print(f"{surface.source}: {len(surface.entries)} paths recorded in {file.name}")
    return 0


def _check(console: Console, uses: Uses, options: argparse.Namespace) -> int:
    read = [from_installed(), *(open_wheel(wheel) for wheel in options.wheel)]
    surfaces = [survey(tree, uses.uses, CLAIMS) for tree in read]
    # A wheel that was read goes before a record of it.
    surfaces += [one for one in recorded() if one.source not in {surface.source for surface in surfaces}]
    problems = list(check_ledgers(uses, surfaces[0]))
    for surface in surfaces:
        problems += check_surface(uses.uses, surface)
        problems += check_claims(surface, options.packages)
    if not options.quiet:
        print_uses(console, uses.uses, surfaces, problems)
        print_ledgers(console)
        for surface in surfaces[1:]:
            print_differences(console, surfaces[0], surface)
    print_problems(console, problems)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
