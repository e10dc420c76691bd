"""The commands `make`, `compare` and `load`; see the package."""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path

from tf_tools.memory._checkpoint import GIB, make_large_checkpoint
from tf_tools.memory._load import Load, MemoryToolError, load_here, measure


def main(arguments: list[str] | None = None) -> int:
    """Run a command. `compare` returns 1 where the peak is more than `--within` percent above vLLM's own."""
    parser = argparse.ArgumentParser(prog="python -m tf_tools.memory", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    make = commands.add_parser("make", help="write a llama-shaped checkpoint of random numbers")
    make.add_argument("folder", type=Path)
    make.add_argument("--gib", type=float, default=2.0, help="at least; no less than one layer and the embeddings take")
    make.add_argument("--tied", action="store_true", help="the head shares the embedding's weight")
    compare = commands.add_parser("compare", help="load with transformers and with vllm, in turns")
    compare.add_argument("folder", type=Path)
    compare.add_argument("--repeat", type=int, default=3)
    compare.add_argument("--within", type=float, default=5.0, help="percent by which the peak may be above vLLM's own")
    load = commands.add_parser("load", help="load in this process, and print one line of JSON")
    load.add_argument("folder", type=Path)
    load.add_argument("--implementation", choices=["transformers", "vllm"], required=True)
    options = parser.parse_args(arguments)
    try:
        if options.command == "make":
            if not options.gib > 0:
                raise MemoryToolError(f"--gib {options.gib:g}: expected a size above 0")
            if options.folder.exists():
                raise MemoryToolError(f"{options.folder} exists already: name a folder that does not")
            print(make_large_checkpoint(options.folder, options.gib, tied=options.tied))
        elif options.command == "load":
            print(load_here(options.folder, options.implementation))
        else:
            return _compare(options)
    except MemoryToolError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _compare(options: argparse.Namespace) -> int:
    loads: dict[str, list[Load]] = {"transformers": [], "vllm": []}
    for turn in range(options.repeat):
        for implementation in sorted(loads, reverse=bool(turn % 2)):
            load = measure(options.folder, implementation)
            loads[implementation].append(load)
            print(_line(load), flush=True)
    ours, theirs = (statistics.median(load.peak for load in loads[name]) for name in ("transformers", "vllm"))
    time_ours, time_theirs = (
        statistics.median(load.weights_seconds for load in loads[name]) for name in ("transformers", "vllm")
    )
    above = 100 * (ours / theirs - 1)
    print(f"peak {above:+.1f} % of vLLM's own; load time {100 * (time_ours / time_theirs - 1):+.1f} %")
    return int(above > options.within)


def _line(load: Load) -> str:
    return (
        f"{load.implementation:12} {load.served_by.rpartition('.')[2]:28} baseline {load.baseline / GIB:.2f}  "
        f"peak +{load.peak / GIB:.3f}  held +{load.held / GIB:.3f} GiB  "
        f"weights {load.weights_seconds:.1f} s  engine {load.seconds:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
