"""A static contract with vLLM: all that our packages use of it exists, with a signature that fits, in builds that need not be installed.

`python -m tf_tools.contract` checks and prints; `python -m tf_tools.contract record --wheel 0.33.0` records what a build has.
Neither imports vLLM: both sides are read as source.
"""

from __future__ import annotations

from tf_tools.contract._check import Problem, check_claims, check_ledgers, check_surface
from tf_tools.contract._claims import CLAIMS, Claim, Covered, Group, Implemented
from tf_tools.contract._collect import Uses, collect, sources
from tf_tools.contract._data import CallShape, Definition, Entry, Place, Surface, Use
from tf_tools.contract._differences import Difference, differences
from tf_tools.contract._errors import ContractError
from tf_tools.contract._surface import dumps, loads, recorded
from tf_tools.contract._survey import survey
from tf_tools.contract._tree import Tree, from_installed, from_wheel
from tf_tools.contract._typed import TYPED, Typed
from tf_tools.contract._wheel import open_wheel

__all__ = [
    "CLAIMS",
    "TYPED",
    "CallShape",
    "Claim",
    "ContractError",
    "Covered",
    "Definition",
    "Difference",
    "Entry",
    "Group",
    "Implemented",
    "Place",
    "Problem",
    "Surface",
    "Tree",
    "Typed",
    "Use",
    "Uses",
    "check_claims",
    "check_ledgers",
    "check_surface",
    "collect",
    "differences",
    "dumps",
    "from_installed",
    "from_wheel",
    "loads",
    "open_wheel",
    "recorded",
    "sources",
    "survey",
]
