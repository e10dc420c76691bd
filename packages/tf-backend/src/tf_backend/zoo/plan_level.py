"""The level `plan`: a tiny model on meta, planned on one rank and on two. No vLLM, no memory.

In: an entry. Out: `PlanFacts`.
"""

from __future__ import annotations

from collections import Counter

from transformers import PreTrainedModel

from tf_backend.capabilities import Capabilities
from tf_backend.errors import ConfigError
from tf_backend.model.skeleton import skeleton
from tf_backend.plan.planner import make_plan
from tf_backend.plan.schema import Parallel, Plan
from tf_backend.zoo.rows import PlanFacts
from tf_backend.zoo.shrink import tiny_config
from tf_backend.zoo.types import Entry

LARGEST = 20_000_000
"""Parameters of a model that is given numbers."""


class NotBuildable(Exception):
    """No model can be made of the default config of a type; `str` says why."""


def tiny_skeleton(entry: Entry) -> PreTrainedModel:
    """The tiny model of `entry` on meta; where sizes cannot be shrunk, one of few layers. Raises `NotBuildable`."""
    first = ""
    for layers_alone in (False, True):
        try:
            return skeleton(tiny_config(entry, layers_alone=layers_alone))
        except Exception as error:  # whatever a config's or a model's own code raises
            first = first or _first_sentence(error)
    raise NotBuildable(first)


def small_skeleton(entry: Entry) -> PreTrainedModel:
    """The tiny model of `entry` on meta, where it is small enough to be given numbers. Raises `NotBuildable`."""
    model = tiny_skeleton(entry)
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > LARGEST:
        raise NotBuildable(f"{size:,} parameters are too many for a tiny model")
    return model


def plan_facts(entry: Entry, capabilities: Capabilities) -> PlanFacts:
    """Plan the tiny model of `entry`."""
    try:
        model = tiny_skeleton(entry)
    except NotBuildable as error:
        return PlanFacts("not buildable", f"{error}")
    plan = make_plan(model, Parallel(), capabilities).plan
    fusions: Counter[str] = Counter()
    for count in plan.summary():
        fusions[count.fusion] += count.count
    two = _on_two_ranks(entry, capabilities) if plan.is_served else ""
    return PlanFacts(
        "served" if plan.is_served else "refused",
        "" if plan.is_served else str(plan.refusals[0]),
        dict(sorted(fusions.items())),
        _misses(plan),
        two,
    )


def _on_two_ranks(entry: Entry, capabilities: Capabilities) -> str:
    """``split``; which classes stay whole on each rank, and why; or why it is refused."""
    plan = make_plan(tiny_skeleton(entry), Parallel(tensor=2), capabilities).plan
    if not plan.is_served:
        return f"refused: {plan.refusals[0].reason}"
    whole = [f"{record.cls} ({record.reason})" for record in plan.placement if record.placement == "replicated"]
    return f"whole on each rank: {'; '.join(sorted(whole))}" if whole else "split"


def _misses(plan: Plan) -> tuple[str, ...]:
    found: dict[str, None] = {}
    for variant in plan.variants:
        for miss in variant.misses:
            line = f" (line {miss.place.line})" if miss.place is not None else ""
            found[f"{variant.class_name}, {miss.fusion}: {miss.reason}{line}"] = None
    return tuple(found)


def _first_sentence(error: BaseException) -> str:
    """One line; without the words that our own error puts around the model's."""
    text = " ".join(str(error).split())
    if isinstance(error, ConfigError) and isinstance(error.__cause__, BaseException):
        cause = error.__cause__
        text = f"{type(cause).__name__}: {' '.join(str(cause).split())}"
    elif not isinstance(error, ConfigError):
        text = f"{type(error).__name__}: {text}"
    return text[:200].strip()
