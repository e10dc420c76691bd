"""Arms: the implementations that are held against each other, and how each is asked for and recognised.

In: names, `ours,in-tree,native,ours2`. Out: `Arm`. A trailing number makes another arm of the same kind: two arms of one
kind differ by noise alone, which is what an A/A comparison shows.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from tf_tools.bench._errors import BenchError

_IN_TREE = "vllm.model_executor.models.transformers."


@dataclass(frozen=True, slots=True)
class ArmKind:
    """One implementation.

    Attributes:
        name: on the command line.
        model_impl: vLLM's option of that name.
        plugins: value of VLLM_PLUGINS; empty loads none.
        served_by: prefix of "module.Class" of the model that must have been loaded.
        not_served_by: prefix that it must not have, or "".
        packages: whose sources, beside vLLM's, are what is measured: their digest is part of every result.
    """

    name: str
    model_impl: str
    plugins: str
    served_by: str
    not_served_by: str = ""
    packages: tuple[str, ...] = ()

    def refusal(self, served_by: str) -> str:
        """Why a model of class `served_by` is not this implementation; "" when it is."""
        if served_by.startswith(self.served_by) and not (
            self.not_served_by and served_by.startswith(self.not_served_by)
        ):
            return ""
        but = f", and not one of {self.not_served_by}*" if self.not_served_by else ""
        return (
            f"arm {self.name!r} was served by {served_by}; expected a class of {self.served_by}*{but}. "
            "What was measured is another implementation: leave this arm out for this model"
        )


_OURS = ("tf_backend", "fx_match", "ast_rewrite", "vllm_layers_bridge", "moe_runner")

KINDS: tuple[ArmKind, ...] = (
    ArmKind("ours", "transformers", "tf_backend", "tf_backend.", packages=_OURS),
    ArmKind("in-tree", "transformers", "", _IN_TREE),
    ArmKind("native", "vllm", "", "vllm.model_executor.models.", _IN_TREE),
)


@dataclass(frozen=True, slots=True)
class Arm:
    """A kind under a name of its own, with caches of its own."""

    name: str
    kind: ArmKind


def parse_arms(names: tuple[str, ...]) -> tuple[Arm, ...]:
    """The arms in the order given; the first is the one that the others are compared with.

    Raises:
        BenchError: unknown, repeated, or fewer than two.
    """
    arms = tuple(parse_arm(name) for name in names)
    if len(set(names)) != len(names):
        raise BenchError(f"arms {', '.join(names)}: each needs a name of its own; a second `ours` is called ours2")
    if len(arms) < 2:
        raise BenchError(f"one arm ({', '.join(names) or 'none'}) has nothing to be compared with; name two or more")
    return arms


def parse_arm(name: str) -> Arm:
    """Raises `BenchError` for an unknown name."""
    base = re.sub(r"\d+$", "", name)
    found = next((kind for kind in KINDS if kind.name == base), None)
    if found is None:
        known = ", ".join(kind.name for kind in KINDS)
        raise BenchError(f"unknown arm {name!r}; known are {known}, each also with a number behind it (ours2)")
    return Arm(name, found)
