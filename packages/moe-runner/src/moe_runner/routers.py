"""How a block chooses experts, as data: the form of its router, the module that gives the logits, and both together for the runner.

In: nothing. Out: frozen structs that travel through a plan as JSON. `moe_runner.route` says in torch what a `RouterForm` means.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import msgspec

Place: TypeAlias = int | str
"""Where an argument of a call stands: its position, or its keyword."""
GroupScore: TypeAlias = Literal["max", "top2"]


class RouterForm(msgspec.Struct, frozen=True, omit_defaults=True):
    """From logits [tokens, experts] to weights and ids [tokens, k].

    score: makes scores of logits. A softmax over what was chosen is a softmax over all, renormalised.
    biased: a correction [experts] is added to the scores for the choice alone, and not in the weights.
    groups, groups_chosen: experts lie in so many equal groups, of which so many are left to choose from; 1 and 1 where there are none.
    group_score: of a group, the score of its best expert, or the sum of the best two.
    renormalised: weights are divided by their sum; `epsilon` is added to that, or is the least that it counts for (`epsilon_is_floor`).
    scaling: factor on the weights.
    """

    score: Literal["softmax", "sigmoid"]
    biased: bool = False
    groups: int = 1
    groups_chosen: int = 1
    group_score: GroupScore = "max"
    renormalised: bool = False
    epsilon: float = 0.0
    epsilon_is_floor: bool = False
    scaling: float = 1.0

    @property
    def name(self) -> str:
        """The form without its numbers: what an engine has or has not."""
        grouped = f"grouped by {self.group_score}" if self.groups > 1 else ""
        parts = (
            self.score,
            "biased" if self.biased else "",
            grouped,
            "renormalised" if self.renormalised else "",
        )
        return " ".join(part for part in parts if part)

    def __str__(self) -> str:
        groups = f"{self.groups_chosen} of {self.groups} groups" if self.groups > 1 else ""
        epsilon = f"sum at least {self.epsilon:g}" if self.epsilon_is_floor else f"sum + {self.epsilon:g}"
        scaling = f"times {self.scaling:g}" if self.scaling != 1.0 else ""
        return ", ".join(part for part in (self.name, groups, epsilon if self.epsilon else "", scaling) if part)


class RouterSpec(msgspec.Struct, frozen=True, tag="router", omit_defaults=True):
    """A router module that gives logits and chooses nothing: x @ weight.T + bias of hidden states x [..., hidden].

    weight, bias: names of its parameters, [experts, hidden] and [experts]; `bias` is empty where there is none.
    child: its linear layer, where it is called as a layer; its parameters are `weight` and `bias` then.
    float32: logits are computed in float32, whatever the weight's type; otherwise in the weight's.
    hidden: where hidden states stand in the call. outputs: how many values it returned; the logits stand in the place of each.
    engine_gate: `weight` and `bias` are loaded into the engine's linear layer for gates, below `RouterLogits`, and are not held by itself.
    """

    weight: str
    hidden: Place
    outputs: int
    float32: bool
    bias: str = ""
    child: str = ""
    name: str = ""
    engine_gate: bool = False


class Routing(msgspec.Struct, frozen=True, omit_defaults=True):
    """Routing inside the runner, whose experts are then given logits [tokens, experts] in the place of weights.

    correction: full name, in the model, of the parameter or buffer that is the form's correction; empty where there is none.
    """

    form: RouterForm
    correction: str = ""
