"""Generated modules against their rewrites: whatever is fused or split over ranks gives the same numbers, whatever is not has a reason.

In: a kind of module, a number of examples, a seed. Out: a tally, and the smallest program found of which it is not so. The programs
are what the fusions are about, in every spelling, among decoys: aliases, writes in place, names bound again, branches on attributes
and on sizes.
"""

from tf_tools.fuzz._campaign import KINDS, Kind, Tally, run_kind, shares
from tf_tools.fuzz._program import Program
from tf_tools.fuzz._property import Counterexample, Verdict, check
from tf_tools.fuzz._report import print_report, report

__all__ = [
    "KINDS",
    "Counterexample",
    "Kind",
    "Program",
    "Tally",
    "Verdict",
    "check",
    "print_report",
    "report",
    "run_kind",
    "shares",
]
