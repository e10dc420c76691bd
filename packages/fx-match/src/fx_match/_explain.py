"""`explain`: in words, what a pattern matched, or how far the nearest attempt came and what stopped it."""

from __future__ import annotations

from typing import Any

from torch import fx

from fx_match._canonical import canonical
from fx_match._find import Match, find
from fx_match._pattern import Pattern
from fx_match._subject import Subject, SubjectLike


def explain(pattern: Pattern, subject: SubjectLike) -> str:
    """Several lines of text: captures with their places, or the failing node with its file, line and source line."""
    subject = Subject.of(subject)
    found = find(pattern, subject)
    if isinstance(found, Match):
        lines = [f"matched {found.root.name} ({len(found.nodes)} nodes)"]
        return "\n".join([*lines, *_captures(found.captures, subject)])
    lines = [f"no match: {found.reason}"]
    if found.node is not None:
        lines.append(f"  at {_node(found.node)}{_place(found.node, subject)}")
        lines += _source(found.node, subject)
    if found.nodes:
        lines.append(f"  nearest attempt matched {found.depth} nodes: {', '.join(_node(node) for node in found.nodes)}")
        lines += _captures(found.captures, subject)
    if subject.trace is not None and subject.trace.stop is not None:
        lines.append(f"  the trace is partial: {subject.trace.stop}")
    return "\n".join(lines)


def _captures(captures: Any, subject: Subject) -> list[str]:
    return [
        f"  {name} = {_node(value)}{_place(value, subject)}" if isinstance(value, fx.Node) else f"  {name} = {value!r}"
        for name, value in captures.items()
    ]


def _node(node: fx.Node) -> str:
    kind = f"{node.op} {node.target}" if node.op in ("call_module", "get_attr") else canonical(node)
    return f"{node.name} [{kind}]"


def _place(node: fx.Node, subject: Subject) -> str:
    location = subject.location(node)
    return f", {location}" if location.file else ""


def _source(node: fx.Node, subject: Subject) -> list[str]:
    location = subject.location(node)
    return [f"    {location.text}"] if location.text and node.op != "placeholder" else []
