"""How much each fault moves the log-probabilities of a checkpoint: whether the oracle would see it.

    python -m tf_tools.sensitivity llama gemma2

A fault is measured twice: made everywhere at once, and at each of its places alone. The smallest effect of one place is
what counts: an oracle that sees a wrong bias only when all layers are wrong would pass a loader that forgets one.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from tf_tools.checkpoints import RECIPES, make_checkpoint
from tf_tools.compare import TOLERANCE
from tf_tools.mutations import MUTATIONS, Anatomy, Mutation
from tf_tools.reference import load_reference, logprobs_of

__all__ = ["VISIBLE", "Effect", "float32_noise", "main", "probe_prompts", "sensitivity"]

VISIBLE = 10 * TOLERANCE
"""An effect at least this large is ten times what the comparison lets pass."""


@dataclass(frozen=True, slots=True)
class Effect:
    """What a mutation does: largest absolute change of a log-probability, over the vocabulary and all positions.

    Attributes:
        mutation: its name.
        sites: number of places.
        everywhere: the effect of all places at once.
        weakest: the smallest effect of one place alone.
        weakest_site: that place.
    """

    mutation: str
    sites: int
    everywhere: float
    weakest: float
    weakest_site: str

    @property
    def visible(self) -> bool:
        return min(self.everywhere, self.weakest) >= VISIBLE


def probe_prompts(vocabulary: int, lengths: SequenceOf[int] = (5, 40), seed: int = 0) -> tuple[tuple[int, ...], ...]:
    """Random token ids: a short prompt, and one longer than the recipes' sliding window. Ids 0 to 2 are left out."""
    draw = random.Random(seed)
    return tuple(tuple(draw.randrange(3, vocabulary) for _ in range(length)) for length in lengths)


def sensitivity(folder: Path, mutations: SequenceOf[Mutation] = MUTATIONS) -> list[Effect]:
    """The effect of each mutation that applies to a checkpoint, in the order given."""
    model = load_reference(folder)
    anatomy = Anatomy.of(model)
    prompts = probe_prompts(model.get_input_embeddings().weight.shape[0])

    def answers() -> list[Tensor]:
        return [logprobs_of(model, p) for p in prompts]

    sound = answers()

    def effect() -> float:
        return max(_distance(a, b) for a, b in zip(sound, answers(), strict=True))

    effects = []
    for mutation in mutations:
        sites = mutation.sites(anatomy)
        if not sites:
            continue
        with mutation.broken(anatomy):
            everywhere = effect()
        alone = {}
        for site in sites:
            with site.broken():
                alone[site.where] = effect()
        weakest = min(alone, key=alone.__getitem__)
        effects.append(Effect(mutation.name, len(sites), everywhere, alone[weakest], weakest))
    if any(not torch.equal(a, b) for a, b in zip(sound, answers(), strict=True)):
        raise RuntimeError(f"a mutation of {folder} was not undone: the last answers are not the first")
    return effects


def float32_noise(folder: Path) -> float:
    """Largest absolute difference of a log-probability between float32 and float64: what no server can be blamed for."""
    single, double = load_reference(folder), load_reference(folder, dtype=torch.float64)
    prompts = probe_prompts(single.get_input_embeddings().weight.shape[0])
    return max(float((logprobs_of(single, p).double() - logprobs_of(double, p)).abs().max()) for p in prompts)


def _distance(one: Tensor, other: Tensor) -> float:
    gap = (one - other).abs()
    return float(torch.where(gap.isnan(), torch.full_like(gap, float("inf")), gap).max())


def main(arguments: SequenceOf[str] | None = None) -> int:
    """Print the table; 1 if a fault is invisible."""
    from rich.console import Console
    from rich.table import Table

    parser = argparse.ArgumentParser(prog="python -m tf_tools.sensitivity", description=__doc__)
    parser.add_argument("recipes", nargs="*", default=list(RECIPES), help=f"of {', '.join(RECIPES)}; all by default")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    console = Console()
    blind = 0
    for name in chosen.recipes:
        with tempfile.TemporaryDirectory() as scratch:
            folder = make_checkpoint(name, Path(scratch, name), seed=chosen.seed)
            effects, noise = sensitivity(folder), float32_noise(folder)
        table = Table(title=f"{name}: float32 noise {noise:.1e}, visible from {VISIBLE:g}", title_justify="left")
        for heading in ("fault", "sites", "everywhere", "weakest site", "at"):
            table.add_column(heading, justify="left" if heading in {"fault", "at"} else "right")
        for e in effects:
            style = "" if e.visible else "bold red"
            table.add_row(
                e.mutation, str(e.sites), f"{e.everywhere:.3g}", f"{e.weakest:.3g}", e.weakest_site, style=style
            )
        console.print(table)
        blind += sum(not e.visible for e in effects)
    if blind:
        console.print(f"{blind} faults are invisible: change the recipes in tf_tools/_recipes.py")
    return int(blind > 0)


if __name__ == "__main__":
    sys.exit(main())
