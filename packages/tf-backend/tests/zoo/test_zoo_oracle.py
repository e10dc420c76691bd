"""The oracle of the development environment, behind the level `serve`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tf_backend.zoo.plan_level import tiny_skeleton
from tf_backend.zoo.serve_level import oracle
from tf_backend.zoo.types import Entry
from tf_tools import zoo
from tf_tools.engine import ServeRequest, ServeResult

pytestmark = pytest.mark.engine


def test_equal_and_then_not(entry: Callable[[str], Entry], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    judge, skeleton, serve = oracle(), tiny_skeleton(entry("causal/llama")), zoo.serve
    answers: list[ServeResult] = []

    def kept(request: ServeRequest) -> ServeResult:
        answers.append(serve(request))
        return answers[-1]

    monkeypatch.setattr(zoo, "serve", kept)
    status, found, positions, worst = judge.judge(skeleton, tmp_path / "first")
    assert (status, found) == ("equal", "")
    assert positions > 100
    assert worst < 2e-3
    reference_for = zoo.reference_for
    monkeypatch.setattr(zoo, "serve", lambda request: answers[0])
    monkeypatch.setattr(zoo, "reference_for", lambda *given: [r + 0.01 for r in reference_for(*given)])
    status, found, _, worst = judge.judge(skeleton, tmp_path / "second")
    assert status == "wrong"
    assert "run 1" in found
    assert worst == pytest.approx(0.01, rel=0.5)
