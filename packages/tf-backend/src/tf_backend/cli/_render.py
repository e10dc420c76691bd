"""A plan for people to read.

In: a `Plan` and a rich console. Out: printed tables; every text of the plan is printed as it is, never as markup.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

from rich import box
from rich.console import Console
from rich.syntax import Syntax
from rich.table import Table
from rich.text import Text
from vllm_layers_bridge.specs import AttentionSpec

from tf_backend.plan.positions import reaches
from tf_backend.plan.schema import HeadStep, Place, Plan


def render_plan(console: Console, plan: Plan) -> None:
    """Print header, fusions, misses, attention, head, refusals and the verdict."""
    render_header(console, plan)
    render_fusions(console, plan)
    _misses(console, plan)
    _attention(console, plan)
    _experts(console, plan)
    _placement(console, plan)
    _stages(console, plan)
    _head(console, plan)
    _verdict(console, plan)


def render_header(console: Console, plan: Plan) -> None:
    """Print what was planned, and for what."""
    origin = plan.provenance
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("architecture", Text(f"{origin.architecture} ({origin.model_type})", style="bold"))
    table.add_row("transformers", Text(f"{origin.transformers}, torch {origin.torch}"))
    table.add_row("engine", Text(origin.capabilities))
    ranks = f"tensor parallel {origin.parallel.tensor}, pipeline parallel {origin.parallel.pipeline}"
    if origin.parallel.data > 1:
        ranks += f", data parallel {origin.parallel.data}"
    if origin.parallel.experts:
        ranks += ", whole experts dealt out"
    table.add_row("ranks", Text(ranks))
    table.add_row("plan", Text(plan.hash[:16]))
    console.print(table)


def render_fusions(console: Console, plan: Plan) -> None:
    """Print how many instances of each class each fusion was applied to, and the layers that this makes."""
    counts = plan.summary()
    if not counts:
        console.print(Text("\nNo fusion applies: every module stays as transformers wrote it."))
    else:
        table = _table("Fusions", "class", "fusion", "modules")
        for line in counts:
            table.add_row(Text(line.cls), Text(line.fusion), str(line.count))
        console.print(table)
    layers = Counter(spec.__struct_config__.tag for module in plan.modules for spec in module.layers)
    if layers:
        listed = ", ".join(f"{count} {str(tag).replace('_', ' ')}" for tag, count in sorted(layers.items(), key=str))
        console.print(Text(f"vLLM layers: {listed}"))


def render_diffs(console: Console, plan: Plan) -> None:
    """Print the unified diff of each rewritten forward, once per variant."""
    diffs = [variant for variant in plan.variants if variant.diff]
    if not diffs:
        console.print(Text("\nNo forward is rewritten."))
    for variant in diffs:
        console.print(Text(f"\n{variant.cls}", style="bold"))
        diff = variant.diff or ""
        if console.is_terminal:
            console.print(Syntax(diff, "diff", background_color="default"))
        else:
            # As it is: no wrapping and no padding, so that it can be read by tools.
            console.file.write(diff if diff.endswith("\n") else diff + "\n")


def _misses(console: Console, plan: Plan) -> None:
    lines: dict[tuple[str, str, str, str], None] = {}
    for variant in plan.variants:
        for miss in variant.misses:
            lines[(variant.class_name, miss.fusion, miss.reason, _where(miss.place))] = None
    if not lines:
        return
    table = _table("Not fused", "class", "fusion", "why", "where")
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    console.print(table)


def _attention(console: Console, plan: Plan) -> None:
    if not plan.attention:
        return
    groups: dict[AttentionSpec, list[int]] = {}
    for layer in plan.attention:
        groups.setdefault(layer.spec, []).append(layer.index)
    table = _table("Attention", "layers", "count", "heads", "kv heads", "head size", "scale", "window", "soft cap")
    for spec, indices in groups.items():
        size = str(spec.head_dim)
        if spec.value_head_dim != spec.head_dim:
            size += f" (values {spec.value_head_dim})"
        window = "all" if spec.sliding_window is None else str(spec.sliding_window)
        cap = "none" if spec.logits_soft_cap is None else f"{spec.logits_soft_cap:g}"
        row = (
            _ranges(indices),
            len(indices),
            spec.num_heads,
            spec.num_kv_heads,
            size,
            f"{spec.scale:.6g}",
            window,
            cap,
        )
        table.add_row(*(Text(str(cell)) for cell in row))
    console.print(table)
    for said in (*plan.latent, *reaches(plan)):
        console.print(Text(str(said)))


def _experts(console: Console, plan: Plan) -> None:
    """What was read of each class of sparse blocks; nothing where there is none."""
    if not plan.experts:
        return
    columns = ("class", "blocks", "what it is", "its experts", "routing", "shared experts")
    table = _table("Experts", *columns)
    lines = Counter(
        (
            entry.cls,
            entry.description,
            f"in the engine's runner: {entry.computes}"
            if entry.runs == "runner"
            else f"as written: {entry.why_written}",
            ": ".join(part for part in (entry.routing, entry.router or entry.why_outside) if part),
            ": ".join(part for part in (entry.shared_runs, entry.why_shared_outside) if part) or "none",
        )
        for entry in plan.experts
    )
    for (cls, *cells), count in lines.items():
        table.add_row(*(Text(cell) for cell in (cls, str(count), *cells)))
    console.print(table)


def _placement(console: Console, plan: Plan) -> None:
    """How each class lies over ranks; nothing on one rank."""
    if not plan.placement:
        return
    table = _table(f"Placement over {plan.provenance.parallel.tensor} ranks", "class", "placement", "count", "reason")
    for record in plan.placement:
        whole = f"{record.replicated_parameters:,} parameters on every rank" if record.replicated_parameters else ""
        reason = "; ".join(part for part in (record.reason, *record.notes, whole) if part)
        table.add_row(record.cls, record.placement, str(record.count), reason)
    console.print(table)


def _stages(console: Console, plan: Plan) -> None:
    """Which layers each pipeline stage has; nothing for one stage."""
    if plan.stages is None:
        return
    table = _table("Pipeline stages", "stage", "layers", "also holds")
    last = len(plan.stages.bounds) - 2
    for stage, (first, end) in enumerate(pairwise(plan.stages.bounds)):
        has_embedding = stage == 0 or (stage == last and plan.stages.tied)
        beside = [plan.stages.embedding] if has_embedding else []
        beside += [*plan.stages.after, plan.stages.head] if stage == last else []
        table.add_row(str(stage), f"{first} to {end - 1}", Text(", ".join(beside)))
    console.print(table)


def _head(console: Console, plan: Plan) -> None:
    if plan.head is None:
        return
    linear = plan.head.linear
    tied = f", tied to {linear.tied_to}" if linear.tied_to else ""
    bias = ", with bias" if linear.bias else ""
    projection = f"{linear.name} ({linear.embedding_dim} to {linear.num_embeddings}{bias}{tied})"
    steps = [*map(_step, plan.head.before), projection, *map(_step, plan.head.after)]
    console.print(Text("\nHead: " + " → ".join(["hidden state", *steps, "logits"])))


def _verdict(console: Console, plan: Plan) -> None:
    if plan.is_served:
        console.print(Text("\nserved", style="bold green"))
        return
    count = len(plan.refusals)
    console.print(Text(f"\nrefused, for {count} reason{'s' if count > 1 else ''}:", style="bold red"))
    for refusal in plan.refusals:
        console.print(Text(f"- {refusal}", style="red"))


def _table(title: str, *columns: str) -> Table:
    table = Table(title=f"\n{title}", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _where(place: Place | None) -> str:
    """``transformers/models/llama/modeling_llama.py:120``, or nothing."""
    return "" if place is None else f"{place.module.replace('.', '/')}.py:{place.line}"


def _step(step: HeadStep) -> str:
    if step.module:
        return step.module
    return f"{step.op}({', '.join(f'{a:g}' if isinstance(a, float) else str(a) for a in step.args)})"


def _ranges(indices: Iterable[int]) -> str:
    """``0-4, 6, 8-9`` for whole numbers in any order; one that comes several times is shown once."""
    runs: list[list[int]] = []
    for index in sorted(set(indices)):
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
