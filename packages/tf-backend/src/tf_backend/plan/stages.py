"""Pipeline stages: which layers each has, and the proof that nothing but the hidden state crosses from one to the next.

In: a model, its decoder and list of layers, the number of stages. Out: a `StagesPlan`, or a refusal. Where more crosses than the hidden
state (embeddings that later layers read again, keys and values that layers share), a boundary between the two is refused.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from transformers import PreTrainedModel
from vllm_layers_bridge.seams.leaf import attention_leaf

from tf_backend.model.stage import Passage, make_stage, unmake_stage
from tf_backend.plan.crossing import BEFORE, Crossing, crossings
from tf_backend.plan.observe import observing, observing_mask, token_counts
from tf_backend.plan.places import place_of_class
from tf_backend.plan.schema import HeadPlan, Refusal, StagesPlan

REMEDY = "Set `--pipeline-parallel-size` to 1; `--tensor-parallel-size` splits a model over several ranks."
REMEDY_BOUNDARY = (
    f"{REMEDY} Or give the layers of each stage in VLLM_PP_LAYER_PARTITION so that no boundary lies between the two."
)

Split = Callable[[int, int], tuple[int, ...]]
"""(layers, stages) -> first layer of each stage, and the number of layers."""


def even_split(layers: int, stages: int) -> tuple[int, ...]:
    """As many layers on each stage; what is left over goes one by one to the stages before the last, which has the head."""
    sizes = [layers // stages] * stages
    for extra in range(layers % stages):
        sizes[-2 - extra] += 1
    return tuple(sum(sizes[:at]) for at in range(stages + 1))


def plan_stages(
    model: PreTrainedModel, base: str, layers: str, head: HeadPlan, stages: int, split: Split = even_split
) -> StagesPlan | Refusal:
    """Cut the list `layers` into stages. Each stage is run on meta."""
    bounds = split(len(list(model.get_submodule(layers).children())), stages)
    if any(first >= last for first, last in pairwise(bounds)):
        return _refusal(model, stages, f"one of them would have none of its {bounds[-1]} layers", REMEDY)
    seen = crossings(model, layers)
    if seen.problem is not None:
        return _refusal(model, stages, seen.problem, REMEDY)
    for boundary in bounds[1:-1]:
        crossing = seen.over(boundary)
        if crossing is not None:
            return _crossing_refusal(model, crossing, boundary, seen.layers)
    embedding = next(name for name, module in model.named_modules() if module is model.get_input_embeddings())
    if seen.argument is None or seen.hidden is None:
        return _refusal(model, stages, "it has a single layer", REMEDY)
    if seen.hidden.dtype is not model.get_input_embeddings().weight.dtype:
        return _refusal(
            model, stages, f"its hidden states are {seen.hidden.dtype}, another type than its weights", REMEDY
        )
    inside = [
        name
        for name in seen.after
        if name.startswith(f"{base}.") and any(True for _ in model.get_submodule(name).parameters())
    ]
    plan = StagesPlan(
        bounds=bounds,
        argument=seen.argument,
        output=seen.output,
        entries=seen.entries,
        width=seen.hidden.shape[-1],
        after=(*(name for name in inside if not any(name.startswith(f"{outer}.") for outer in inside)), *head.modules),
        embedding=embedding,
        head=head.linear.name,
        tied=head.linear.tied_to is not None,
    )
    for rank in range(stages):
        problem = _run_problem(model, base, layers, plan, rank)
        if problem is not None:
            return _refusal(model, stages, f"stage {rank} does not run alone: {problem}", REMEDY)
    return plan


def _run_problem(model: PreTrainedModel, base: str, layers: str, plan: StagesPlan, rank: int) -> str | None:
    """Why a stage does not give hidden states of the right shape on meta; None when it does."""
    passage = Passage()
    dtype = model.get_input_embeddings().weight.dtype
    tokens = torch.zeros((1, token_counts(model)[0]), dtype=torch.long, device="meta")
    hidden = torch.empty((*tokens.shape, plan.width), dtype=dtype, device="meta")
    gone = make_stage(model, plan, layers, rank, passage)
    try:
        passage.received = None if rank == 0 else hidden
        given = {"input_ids": tokens} if rank == 0 else {"inputs_embeds": hidden}
        with observing(model, attention_leaf, observing_mask), torch.no_grad():
            output = model.get_submodule(base)(**given, position_ids=tokens.clone(), use_cache=False, return_dict=True)
    except Exception as error:  # the model's own code, run without some of its parts
        first = " ".join(str(error).split())[:200]
        return f"{type(error).__name__}: {first}"
    finally:
        unmake_stage(model, gone)
    result = output.last_hidden_state if rank == len(plan.bounds) - 2 else passage.sent
    if not isinstance(result, torch.Tensor) or result.shape[:2] != tokens.shape or result.dtype is not dtype:
        return "it gives no hidden states of its tokens"
    return None


def _refusal(model: PreTrainedModel, stages: int, reason: str, remedy: str) -> Refusal:
    cls = type(model)
    return Refusal(
        f"`{cls.__name__}` cannot be cut into {stages} pipeline stages: {reason}", "", place_of_class(cls), remedy
    )


def _crossing_refusal(model: PreTrainedModel, crossing: Crossing, boundary: int, layers: int) -> Refusal:
    cls = type(model.get_submodule(crossing.module))
    made = "before the first layer" if crossing.made == BEFORE else f"in layer {crossing.made}"
    read = "after the last" if crossing.read == layers else f"in layer {crossing.read}"
    return Refusal(
        f"`{cls.__name__}` reads {read} what was made {made} and is not the hidden state ({crossing.what}): a pipeline boundary before "
        f"layer {boundary} would lie between them",
        crossing.module,
        crossing.place or place_of_class(cls),
        REMEDY_BOUNDARY,
    )
