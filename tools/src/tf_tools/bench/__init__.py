"""Paired measurement of speed: fresh processes of each implementation, one after the other, ratios with intervals.

    python -m tf_tools.bench --model DIR --arms ours,in-tree,ours2 --pairs 9 --json results.jsonl
    python -m tf_tools.bench --report results.jsonl

Nothing here imports torch or vLLM: that is left to the measured process, whose imports are part of what is measured.
"""

from __future__ import annotations

from tf_tools.bench._arms import KINDS, Arm, ArmKind, parse_arms
from tf_tools.bench._compare import Comparison, Cost, comparisons, costs, failures
from tf_tools.bench._errors import BenchError
from tf_tools.bench._process import launch
from tf_tools.bench._record import Record, locked, open_record, read_record
from tf_tools.bench._rows import Finished, Measure, Row
from tf_tools.bench._run import Limits, run_pairs
from tf_tools.bench._schedule import PRIME, Start, order, pair_starts
from tf_tools.bench._settings import Settings, fingerprint
from tf_tools.bench._statistics import Interval, median_interval

__all__ = [
    "KINDS",
    "PRIME",
    "Arm",
    "ArmKind",
    "BenchError",
    "Comparison",
    "Cost",
    "Finished",
    "Interval",
    "Limits",
    "Measure",
    "Record",
    "Row",
    "Settings",
    "Start",
    "comparisons",
    "costs",
    "failures",
    "fingerprint",
    "launch",
    "locked",
    "median_interval",
    "open_record",
    "order",
    "pair_starts",
    "parse_arms",
    "read_record",
    "run_pairs",
]
