"""A plan on paper: every part of it is there, and no text of it is taken for markup."""

from __future__ import annotations

import io

import msgspec
from rich.console import Console
from tf_backend.cli._render import _ranges, render_diffs, render_plan
from tf_backend.plan.schema import ExpertsPlan, LatentPlan, Plan, Refusal


def _printed(plan: Plan, *, terminal: bool = False, diffs: bool = False) -> str:
    file = io.StringIO()
    console = Console(file=file, width=140, force_terminal=terminal, markup=False, highlight=False)
    render_plan(console, plan)
    if diffs:
        render_diffs(console, plan)
    return file.getvalue()


def _line(text: str, *words: str) -> str:
    """The one line that holds all the words."""
    (found,) = [line for line in text.splitlines() if all(word in line for word in words)]
    return found


def test_fusions_are_counted_by_class(toy_plan: Plan) -> None:
    assert _line(_printed(toy_plan), "ToyMLP", "glu_mlp").split() == ["ToyMLP", "glu_mlp", "2"]


def test_layers_are_counted_by_kind(toy_plan: Plan) -> None:
    assert "vLLM layers: 2 merged linear" in _printed(toy_plan)


def test_misses_say_why_and_where(toy_plan: Plan) -> None:
    line = _line(_printed(toy_plan), "ToyNorm", "rms_norm")
    assert "eps is [added] after the root" in line
    assert "transformers/models/toy/modeling_toy.py:17" in line


def test_attention_is_one_row_per_distinct_layer(toy_plan: Plan) -> None:
    text = _printed(toy_plan)
    assert _line(text, "0-2, 4").split() == ["0-2,", "4", "4", "4", "2", "64", "0.125", "all", "none"]
    assert _line(text, "0.125", "16").split() == ["3", "1", "4", "2", "64", "0.125", "16", "50"]


def test_keys_and_values_that_could_be_narrower_are_told(toy_plan: Plan) -> None:
    latent = LatentPlan("ToyAttention", 5, 512, 64, 32768, 576, "nothing takes these sizes")
    assert "cached expanded" not in _printed(toy_plan)
    text = _printed(msgspec.structs.replace(toy_plan, latent=(latent,)))
    assert "65,536 bytes per token and layer in 16 bits; compressed (512 + 64) they would take 1,152" in " ".join(
        text.split()
    )


def test_experts_in_the_runner_are_told_from_those_as_written_and_why(toy_plan: Plan) -> None:
    fused = ExpertsPlan("model.layers.0.mlp", "experts", "ToyBlock", "4 experts", "silu, as `silu`", why_outside="odd")
    written = ExpertsPlan(
        "model.layers.1.mlp", "experts", "OddBlock", "4 experts", "not known", "as written", "no kernel computes them"
    )
    text = _printed(msgspec.structs.replace(toy_plan, experts=(fused, written)))
    assert "in the engine's runner: silu, as `silu`" in _line(text, "ToyBlock")
    assert "as written: no kernel computes them" in _line(text, "OddBlock")
    assert "not known" not in text
    only_written = _printed(msgspec.structs.replace(toy_plan, experts=(written,)))
    assert "runner" not in only_written


def test_head_is_a_chain(toy_plan: Plan) -> None:
    line = _line(_printed(toy_plan), "Head:")
    assert "lm_head (32 to 256, tied to model.embed_tokens) → div(x, 30) → tanh(x) → mul(x, 30) → logits" in line


def test_served_and_refused(toy_plan: Plan, refusal: Refusal) -> None:
    assert _printed(toy_plan).rstrip().endswith("served")
    refused = _printed(msgspec.structs.replace(toy_plan, refusals=(refusal, refusal)))
    assert "refused, for 2 reasons:" in refused
    assert "modeling_toy, line 77" in " ".join(refused.split())


def test_refusals_are_red_on_a_terminal(toy_plan: Plan, refusal: Refusal) -> None:
    assert "\x1b[31m" in _printed(msgspec.structs.replace(toy_plan, refusals=(refusal,)), terminal=True)


def test_a_plan_without_anything_says_so(toy_plan: Plan) -> None:
    bare = msgspec.structs.replace(toy_plan, variants=(), modules=(), attention=(), head=None)
    text = _printed(bare, diffs=True)
    assert "No fusion applies" in text
    assert "No forward is rewritten." in text


def test_diffs_keep_their_lines_in_a_pipe(toy_plan: Plan) -> None:
    text = _printed(toy_plan, diffs=True)
    assert "\n-        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))\n" in text


def test_diffs_are_coloured_on_a_terminal(toy_plan: Plan) -> None:
    assert "act_and_mul" in _printed(toy_plan, terminal=True, diffs=True)


def test_ranges_of_layers() -> None:
    assert _ranges([8, 0, 1, 2, 6, 9]) == "0-2, 6, 8-9"
    assert _ranges([0, 0, 1, 1, 0]) == "0-1"
    assert _ranges([]) == ""


def test_placement_is_shown_with_its_reason_and_cost() -> None:
    import io

    import msgspec
    from rich.console import Console
    from tf_backend.cli._render import render_plan
    from tf_backend.plan.schema import Parallel, PlacementRecord, Plan, Provenance

    provenance = Provenance("A", "a", "0", "5", "2", {}, "cpu", "0", Parallel(tensor=2))
    plan = Plan(provenance, "model", "model.layers", (), (), (), None, (), ())
    record = PlacementRecord("SomeMLP", "replicated", 3, "`norm` is a norm over all the features", 147456)
    other = PlacementRecord("SomeAttention", "split", 3, "", 5120, ("`a_proj`: whole on every rank",))

    def shown(of: Plan) -> str:
        console = Console(file=io.StringIO(), width=200)
        render_plan(console, of)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    assert "Placement" not in shown(plan)
    text = shown(msgspec.structs.replace(plan, placement=(record, other)))
    assert "Placement over 2 ranks" in text
    assert "SomeMLP" in text
    assert "147,456 parameters on every rank" in text
    assert "`a_proj`: whole on every rank; 5,120 parameters on every rank" in text
