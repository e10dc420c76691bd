"""``python -m tf_tools.fuzz``: 0 when the property held of every example, 1 when it did not, 2 for an error."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command."""
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from tf_tools.fuzz import KINDS, print_report, run_kind, shares

    parser = argparse.ArgumentParser(prog="python -m tf_tools.fuzz", description=__doc__)
    parser.add_argument("--examples", type=int, default=5000, help="over all kinds together (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--kind", action="append", choices=tuple(KINDS), help="one kind alone; may be repeated")
    options = parser.parse_args(arguments)
    if options.examples < 1:
        print(f"error: --examples must be at least 1, found {options.examples}", file=sys.stderr)
        return 2
    import torch

    torch.set_num_threads(1)
    tallies = []
    with tempfile.TemporaryDirectory(prefix="fuzz-cache-") as cache:
        os.environ["AST_REWRITE_CACHE"] = cache
        for kind, number in shares(options.examples, tuple(options.kind or KINDS)).items():
            tallies.append(run_kind(kind, number, number=options.seed, on_found=_told))
            last = tallies[-1]
            found = ", a counterexample" if last.counterexample else ""
            done = f"{kind}: {last.examples} examples, {last.fused} fused, {last.seconds:.0f} s{found}"
            print(done, file=sys.stderr, flush=True)
    print_report(tallies)
    return 1 if any(tally.counterexample for tally in tallies) else 0


def _told(problem: Exception) -> None:
    print(f"{problem}\n\nMaking it smaller ...", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
