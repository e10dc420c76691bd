"""Placement: how the weights and values of one module lie over tensor-parallel ranks.

In: the trace of a module, the layers its plan gives it, the ranks. Out: the styles of its linears, or the reason why the module is computed
whole on every rank.

Each value of the graph is whole, or split along one axis. Placement starts from the projections that read a whole input, takes
them as split on their outputs, and follows the values: through views, element-wise operations, norms, attention over heads. It holds when
every split value ends in a linear that takes its pieces and sums over ranks, so that what the module returns is whole again. Everything
that it does not know ends it: the module then stays whole, which is right and costs memory and time, and the plan says so.
"""

from tf_backend.plan.placement.search import place
from tf_backend.plan.placement.states import LocalSize, OwnShard, Packed, Part, Shards, Spelled, State, Styles, Unplaced
from tf_backend.plan.placement.walk import linear_sizes

__all__ = [
    "LocalSize",
    "OwnShard",
    "Packed",
    "Part",
    "Shards",
    "Spelled",
    "State",
    "Styles",
    "Unplaced",
    "linear_sizes",
    "place",
]
