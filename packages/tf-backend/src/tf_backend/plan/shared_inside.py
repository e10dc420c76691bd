"""A block's sum of routed and shared experts becomes the routed ones alone, whose runner adds the shared ones.

    hidden_states = hidden_states + self.shared_experts(residuals)      ->      hidden_states = hidden_states

In: the trace of a block, which of its children are its experts. Out: its forward, rewritten; the shared experts stay its children and
are called by the runner. Where their result was kept under a name, the statement goes, or the name is bound to None.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import moe_runner
from ast_rewrite import Patch, Refused, SourceSpan
from fx_match import Match, Miss, Subject, Trace
from moe_runner import Place, SharedSite
from torch import nn
from vllm_layers_bridge.errors import NotFusable
from vllm_layers_bridge.fusions.children import has_hooks, other_use
from vllm_layers_bridge.fusions.protocol import ModuleFacts
from vllm_layers_bridge.fusions.source import is_path_known, require_nothing_lost, require_same_forward, source_span
from vllm_layers_bridge.specs import LayerSpec

NAME = "shared_experts"


@dataclass(frozen=True, slots=True)
class ExpertsChild:
    """The child of a block that the runner takes the place of, and where it is given hidden states."""

    name: str
    hidden: Place


class SharedInside:
    """See the module.

    Args:
        children: for each class of blocks with shared experts, the child that holds the routed ones.
        why_not: of a block by full name and the child that is its shared experts, what stands against it beside its graph; or "".
    """

    name = NAME
    replaces_module = False

    def __init__(self, children: Mapping[type[nn.Module], ExpertsChild], why_not: Callable[[str, str], str]) -> None:
        self._children = dict(children)
        self._why_not = why_not

    def is_candidate(self, trace: Trace) -> bool:
        """A block with shared experts."""
        return trace.module_class in self._children

    def match(self, trace: Trace) -> Match | Miss:
        """The sum of what experts and shared experts give for the same hidden states."""
        child = self._children.get(trace.module_class)
        if child is None:
            return _miss(trace, "it is no block with shared experts")
        site = moe_runner.find_shared(trace, experts=child.name, hidden=child.hidden)
        if isinstance(site, str):
            return _miss(trace, site)
        return Match(site.total, {"site": site}, (site.shared, site.total), Subject.of(trace))

    def check(self, match: Match, module: nn.Module, facts: ModuleFacts) -> None:
        """What is known of this block beyond its graph does not stand against it."""
        site: SharedSite = match["site"]
        if why := self._why_not(facts.name, str(site.shared.target)):
            raise NotFusable(why)
        for node in (site.shared, site.gate):
            if node is not None and has_hooks(module.get_submodule(str(node.target))):
                raise NotFusable(f"its `{node.target}` has hooks, or a forward of its own")

    def rewrite(self, match: Match, trace: Trace, patch: Patch) -> None:
        """The sum becomes what the experts give; what is computed for it alone goes."""
        require_same_forward(trace, patch)
        site: SharedSite = match["site"]
        for node in (site.shared, site.gate):
            if node is not None and (use := other_use(trace, node)) is not None:
                raise Refused(use[1])
        if not is_path_known(trace):
            raise Refused("its forward may take another path than the one that was traced")
        total = source_span(trace, site.total)
        spans = {source_span(trace, node) for node in site.going}
        kept, rest, name = _parts(patch, total, site.routed)
        outermost = [span for span in spans if not any(other != span and other.contains(span) for other in spans)]
        for span in (rest, *outermost):
            require_nothing_lost(trace, patch, span, kept)
        if any(span.contains(kept) for span in spans):
            raise Refused("its experts are called within what would go", total)
        if name is None:
            patch.replace(total, "{kept}", kept=kept)
        else:
            if site.routed:
                patch.insert_before(total, f"{name} = {{kept}}", kept=kept)
            patch.delete(total)
        for span in sorted((span for span in outermost if not total.contains(span)), reverse=True):
            try:
                patch.delete(span)
            except Refused:  # something reads the name on a path that is not taken, or hands it on
                patch.replace(span, "None", dropping=(span,))

    def layers(self, match: Match, module: nn.Module, facts: ModuleFacts) -> tuple[LayerSpec, ...]:
        """None: the runner is told of its shared experts when it is built."""
        return ()


def _miss(trace: Trace, reason: str) -> Miss:
    return Miss(reason, None, {}, (), Subject.of(trace))


def _parts(patch: Patch, total: SourceSpan, routed: int) -> tuple[SourceSpan, SourceSpan, str | None]:
    """The operand of the sum at `total` that the experts are, the expression that goes but for that, and `name` of ``name += b``."""
    additions = (node for node in ast.walk(patch.source.tree) if isinstance(node, ast.AugAssign))
    statement = next((node for node in additions if SourceSpan.of(node) == total), None)
    if statement is not None:
        if not isinstance(statement.op, ast.Add) or not isinstance(statement.target, ast.Name):
            raise Refused(f"the sum is written as `{ast.unparse(statement)}`, expected `name += b`", total)
        value, target = SourceSpan.of(statement.value), SourceSpan.of(statement.target)
        return value if routed else target, value, statement.target.id
    made = patch.source.expression_at(total)
    if not isinstance(made, ast.BinOp) or not isinstance(made.op, ast.Add):
        raise Refused(f"the sum is written as `{ast.unparse(made)}`, expected `a + b`", total)
    return SourceSpan.of(made.right if routed else made.left), total, None
