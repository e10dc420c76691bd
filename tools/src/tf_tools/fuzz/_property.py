"""What must hold of every program: planning never raises, and what it made of a block gives what the block gives.

In: a program. Out: a `Verdict`, or `Counterexample`. A block that planning refuses stays as it is written; then the reason is kept, and the
rest of the model, such as its plain linears, is compared all the same. On several ranks each rank's block must give the whole.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from tf_backend.zoo.numbers_level import difference, plain_attention

from tf_tools.fuzz._plan import FuzzPlan, attention_by, planned
from tf_tools.fuzz._program import Loaded, Model, Program, arguments, loaded
from tf_tools.fuzz._ranks import Applied, Ran, run_on_ranks

TOLERANCE = 1e-5
"""Norm of the difference over norm of the original, in float32."""

SHAPES = ((1, 7), (1, 1), (2, 3), (1, 13))
"""(batch, tokens) of the inputs: one token, several, more rows than one."""

RANKS = (2,)
_CALLS = 2
"""In a row, of the same instance: one call may leave something to the next."""


class Counterexample(AssertionError):
    """A program of which the property does not hold; `str` says how, and holds the program."""

    def __init__(self, program: Program, problem: str) -> None:
        super().__init__(f"{problem}\n\n{program}")
        self.program = program
        self.problem = problem


@dataclass(frozen=True, slots=True)
class Verdict:
    """What planning made of a program.

    fused: blocks whose forward was rewritten, or that were replaced; blocks: how many there are that run.
    reasons: why the others were not. split: blocks that are split over two ranks. compared: how often numbers were compared.
    """

    kind: str
    blocks: int
    fused: int
    split: int
    reasons: tuple[str, ...]
    compared: int


def check(program: Program) -> Verdict:
    """Raises Counterexample where the property does not hold."""
    try:
        with loaded(program) as module:
            return _check(module)
    except Counterexample:
        raise
    except Exception as error:
        lines = "".join(traceback.format_exception(error)[-4:])
        raise Counterexample(program, f"raised {type(error).__name__}: {error}\n{lines}") from error


def _check(module: Loaded) -> Verdict:
    program = module.program
    plan = planned(module, RANKS)
    names = [f"layers.{at}" for at in range(len(program.instances))]
    changed = [m.name for m in plan.modules.values() if m.variant is not None and m.action != "keep"]
    fused = [name for name in names if any(f"{other}.".startswith(f"{name}.") for other in changed)]
    split = [name for name in names if any(_is_split(plan, name, ranks) for ranks in plan.placed)]
    reasons = tuple(dict.fromkeys(r for name in names if name not in fused for r in plan.reasons.get(name, ())))
    compared = 0
    if not plan.failures:  # a model whose run fails on meta is not served at all
        model = module.model(on_meta=False)
        with attention_by(model, plain_attention):
            for name in names:
                for batch, tokens in SHAPES:
                    compared += _compare(plan, model, name, program, batch, tokens)
    return Verdict(program.kind, len(names), len(fused), len(split), reasons, compared)


def _is_split(plan: FuzzPlan, name: str, ranks: int) -> bool:
    modules = [m for m in plan.placed[ranks].modules if m.name == name or m.name.startswith(f"{name}.")]
    return any(getattr(layer, "style", "") == "row" for m in modules for layer in m.layers)


def _compare(plan: FuzzPlan, model: Model, name: str, program: Program, batch: int, tokens: int) -> int:
    """How often numbers were compared: none where the block itself does not run."""
    block = model.get_submodule(name)

    def given() -> list[Any]:
        return [arguments(program, batch, tokens, model.positions) for _ in range(_CALLS)]

    try:
        (expected,) = run_on_ranks(Applied({}, {}, {}), block, name, 1, given)
    except Exception:  # the block's own code
        return 0
    calls = {name: len(specs) for name, specs in plan.attention.items()}
    count = 0
    for ranks, modules in _layouts(plan, name):
        where = f"{name} on {ranks} rank{'s' if ranks > 1 else ''}, input {[batch, tokens, program.features]}"
        try:
            found = run_on_ranks(Applied(modules, plan.rewrites, calls), block, name, ranks, given)
        except Exception as error:
            lines = "".join(traceback.format_exception(error)[-3:])
            raise Counterexample(
                program, f"{where}: {type(error).__name__}: {error}\n{lines}{_diff(plan, name)}"
            ) from error
        for ran in found:
            for what, gap in _gaps(ran, expected, ranks):
                if not gap <= TOLERANCE:
                    raise Counterexample(program, f"{where}: {what} differs by {gap:.2g}{_diff(plan, name)}")
        count += 1
    return count


def _gaps(found: Ran, expected: Ran, ranks: int) -> Iterator[tuple[str, float]]:
    yield "the result", difference(_plain(found.results), _plain(expected.results))
    yield "what is left in the input", difference(_plain(found.given), _plain(expected.given))
    if ranks == 1:  # on several, the module may hold a part of a value
        keys = sorted(expected.state)
        states = [_plain([ran.state.get(key) for key in keys]) for ran in (found, expected)]
        yield "what the module holds afterwards", difference(*states) if keys else 0.0


def _layouts(plan: FuzzPlan, name: str) -> Iterator[tuple[int, dict[str, Any]]]:
    yield 1, plan.modules
    for ranks, placed in plan.placed.items():
        if not placed.refusals and _is_split(plan, name, ranks):
            yield ranks, {module.name: module for module in placed.modules}


def _plain(value: Any) -> Any:
    """Tensors in a list; numbers as tensors, so that they are compared too."""
    if value is None or isinstance(value, bool | int | float):
        return torch.tensor(float(value or 0.0))
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _diff(plan: FuzzPlan, name: str) -> str:
    """The forward as it was rewritten."""
    module = plan.modules.get(name)
    rewrite = plan.rewrites.get(module.variant or "") if module is not None else None
    return f"\n{rewrite.text}" if rewrite is not None else ""
