"""One text file for each model type: its rewritten forwards, the layers that they call, and what was replaced or missed.

In: names of types. Out: ``FOLDER/causal/llama.txt``. Nothing in it depends on the machine, the time, or hashes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec


def dump(folder: Path, names: Sequence[str] = (), kinds: Sequence[str] = ()) -> int:
    """Write the files; how many. Types that cannot be built, or whose plan holds nothing, have a file that says so.

    Raises:
        tf_backend.errors.OptionRefused: a name or kind that fits nothing.
    """
    import os

    import torch
    from tf_backend import capabilities
    from tf_backend.zoo.forks import run_forked
    from tf_backend.zoo.types import select

    torch.set_num_threads(1)
    engine = capabilities.shipped()
    entries = {entry.name: entry for entry in select(names, kinds)}
    jobs = ((name, lambda entry=entry: _text(entry, engine).encode()) for name, entry in entries.items())
    for outcome in run_forked(jobs, at_once=len(os.sched_getaffinity(0)), timeout=120.0):
        file = folder / f"{outcome.name}.txt"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(outcome.value or f"failed: {outcome.failure}\n".encode())
    return len(entries)


def _text(entry: object, engine: object) -> str:
    return "\n".join(_lines(entry, engine)) + "\n"


def _lines(entry: object, engine: object) -> Iterator[str]:
    from tf_backend.plan.planner import make_plan
    from tf_backend.plan.schema import Parallel
    from tf_backend.zoo.plan_level import NotBuildable, tiny_skeleton

    try:
        model = tiny_skeleton(entry)  # type: ignore[arg-type]
    except NotBuildable as error:
        yield f"not buildable: {error}"
        return
    plan = make_plan(model, Parallel(), engine).plan  # type: ignore[arg-type]
    yield f"{plan.provenance.architecture}: {'served' if plan.is_served else 'refused'}"
    yield from (f"  {refusal}" for refusal in plan.refusals)
    for variant in plan.variants:
        modules = [module for module in plan.modules if module.variant == variant.id]
        if not (variant.fusions or variant.misses) or not modules:
            continue
        yield ""
        yield f"=== {variant.cls}, {len(modules)} modules: {modules[0].action}"
        yield from (f"fusion {fusion.name}, lines {', '.join(map(str, fusion.lines))}" for fusion in variant.fusions)
        yield from (f"missed {miss.fusion}: {miss.reason}" for miss in variant.misses)
        yield from (f"layer {msgspec.json.encode(layer).decode()}" for layer in modules[0].layers)
        if variant.rewritten:
            yield "---"
            yield variant.rewritten.rstrip()
