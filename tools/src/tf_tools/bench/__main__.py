"""``python -m tf_tools.bench``: hold the speed of implementations against each other in pairs of fresh processes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from tf_tools.bench._compare import comparisons
from tf_tools.bench._errors import BenchError
from tf_tools.bench._process import launch
from tf_tools.bench._progress import ConsoleProgress
from tf_tools.bench._record import Record, locked, open_record, read_record
from tf_tools.bench._report import print_report
from tf_tools.bench._rows import CLOCKS
from tf_tools.bench._run import Limits, run_pairs
from tf_tools.bench._settings import Settings, fingerprint

_WIDTH = 180
"""Columns of a report that goes to a file."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command: 0 when it ended as asked, 1 when --check found a comparison that does not pass, 2 on an error."""
    options = _parser().parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else _WIDTH)
    told = Console(stderr=True, width=None if sys.stderr.isatty() else _WIDTH)
    try:
        record = read_record(options.report) if options.report else _measured(options, told)
        print_report(console, record, clock=options.clock)
        return int(options.check and not _all_pass(record, options.clock))
    except BenchError as error:
        told.print(str(error), style="red", markup=False, soft_wrap=True)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tf_tools.bench", description=__doc__)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--model", type=Path, metavar="DIR", help="checkpoint to measure with")
    what.add_argument("--report", type=Path, metavar="FILE", help="print the report of a results file; measure nothing")
    parser.add_argument("--arms", type=_names, default=("ours", "in-tree"), help="ours, in-tree, native; ours2 for A/A")
    parser.add_argument("--modes", type=_names, default=("eager",), help="of eager, compiled")
    parser.add_argument("--pairs", type=int, default=9, help="of each mode (default 9; 6 for an interval)")
    parser.add_argument("--concurrency", type=_numbers, default=(1, 8), help="requests at once (default 1,8)")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--input", type=int, default=64, metavar="TOKENS", help="of each request (default 64)")
    parser.add_argument("--output", type=int, default=32, metavar="TOKENS", help="of each request (default 32)")
    parser.add_argument("--repeats", type=int, default=3, help="measured runs in each process (default 3)")
    parser.add_argument("--threads", type=int, default=1, help="and cores of each process (default 1)")
    parser.add_argument(
        "--engine", type=_object, default={}, metavar="JSON", help="arguments of vllm.LLM, for all arms"
    )
    parser.add_argument("--env", type=_variable, action="append", default=[], metavar="NAME=VALUE", help="for all arms")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="results, one line per process; continued if it exists"
    )
    parser.add_argument(
        "--minutes", type=float, help="begin no pair that would end later; continue with the same command"
    )
    parser.add_argument("--timeout", type=float, default=900.0, metavar="SECONDS", help="of one process (default 900)")
    parser.add_argument("--retry", action="store_true", help="measure pairs with a failed process again")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="cpu", help="that verdicts go by (default cpu; wall on a GPU)"
    )
    parser.add_argument("--check", action="store_true", help="exit with 1 unless every comparison of whole runs passes")
    return parser


def _measured(options: argparse.Namespace, told: Console) -> Record:
    settings = Settings(
        model=options.model,
        arms=options.arms,
        modes=options.modes,
        concurrency=options.concurrency,
        dtype=options.dtype,
        input_tokens=options.input,
        output_tokens=options.output,
        repeats=options.repeats,
        threads=options.threads,
        engine=options.engine,
        environment=dict(options.env),
    )
    settings.check()
    seconds = None if options.minutes is None else options.minutes * 60
    limits = Limits(options.pairs, seconds, options.timeout, options.retry)
    scratch = Path(tempfile.mkdtemp(prefix="bench-"))
    file: Path = options.json or scratch / "results.jsonl"
    caches = Path(f"{file}.caches").resolve()
    total = len(settings.modes) * len(settings.arms) * (limits.pairs + 1)
    try:
        with locked(file), ConsoleProgress(told, total) as progress:
            record = open_record(file, fingerprint(settings))
            try:
                is_whole = run_pairs(settings, record, caches, limits, launch, progress)
            except KeyboardInterrupt:
                is_whole = False
            if not is_whole:
                more = f"; the same command continues {file}" if options.json else ""
                told.print(f"Stopped before all pairs were measured{more}.", markup=False, soft_wrap=True)
        return record
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _all_pass(record: Record, clock: str) -> bool:
    """Of whole runs, against other kinds: all pass, and none is missing."""
    held = [one for one in comparisons(record) if (one.phase, one.clock) == ("all", clock) and not one.is_same_kind]
    return bool(held) and all(one.passes for one in held)


def _names(text: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in text.split(",") if name.strip())


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(name) for name in _names(text))
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r}: expected numbers with commas between") from error


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a JSON object")
    return value


def _variable(text: str) -> tuple[str, str]:
    name, separator, value = text.partition("=")
    if not separator or not name:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=VALUE")
    return name, value


if __name__ == "__main__":
    sys.exit(main())
