from __future__ import annotations

import pytest
import torch
from tf_tools.compare import ComparisonError, compare_run
from tf_tools.sequences import Sequence
from torch import Tensor

PROMPT, TOKENS = (1, 2, 3), (4, 0)


def reference() -> Tensor:
    """[5, 6]; the greedy token at the two generated positions (rows 2 and 3) is 4, then 0."""
    logits = torch.zeros(5, 6)
    logits[2, 4] = logits[3, 0] = 2.0
    return logits.log_softmax(-1)


def served(rows: Tensor, tokens: tuple[int, ...] = TOKENS, start: int = 0) -> Sequence:
    return Sequence(PROMPT, tokens, rows, start)


def test_equal() -> None:
    report = compare_run([reference()], [served(reference()[:4])])
    assert report.ok
    assert report.worst == 0.0
    assert str(report).startswith("equal: 4 positions in 1 sequences")


@pytest.mark.parametrize(("position", "phase"), [(0, "prompt"), (1, "prompt"), (2, "generated"), (3, "generated")])
def test_one_entry_at_any_position_is_enough(position: int, phase: str) -> None:
    rows = reference()[:4].clone()
    rows[position, 5] += 0.01
    report = compare_run([reference()], [served(rows)])
    assert not report.ok
    assert report.where is not None
    assert (report.where.position, report.where.phase, report.where.token) == (position, phase, 5)
    assert report.worst == pytest.approx(0.01, abs=1e-5)
    assert [i for i, d in enumerate(report.differences[0].tolist()) if d > 0] == [position]
    assert f"position {position} ({phase}), token 5" in str(report)


def test_just_inside_the_tolerance() -> None:
    assert compare_run([reference()], [served(reference()[:4] + 1.9e-3)]).ok
    assert not compare_run([reference()], [served(reference()[:4] + 2.1e-3)]).ok


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_on_one_side_is_infinitely_wrong(value: float) -> None:
    rows = reference()[:4].clone()
    rows[1, 0] = value
    report = compare_run([reference()], [served(rows)])
    assert not report.ok
    assert report.worst == float("inf")


def test_nan_on_both_sides_is_wrong_too() -> None:
    rows = reference()
    rows[1, 0] = float("nan")
    assert not compare_run([rows], [served(rows[:4].clone())]).ok


def test_minus_infinity_on_both_sides_is_equal() -> None:
    rows = reference()
    rows[1, 0] = float("-inf")
    assert compare_run([rows], [served(rows[:4].clone())]).ok


def test_a_wrong_token_with_right_distributions_is_wrong() -> None:
    report = compare_run([reference()], [served(reference()[:4], tokens=(4, 1))])
    assert not report.ok
    (mismatch,) = report.mismatches
    assert (mismatch.step, mismatch.expected, mismatch.served) == (1, 0, 1)
    assert "generated token 1: expected 0, served 1" in str(report)


def test_a_token_within_the_margin_may_differ() -> None:
    rows = reference().clone()
    rows[3, 1] = rows[3, 0] - 3e-3
    assert compare_run([rows], [served(rows[:4], tokens=(4, 1))]).ok
    rows[3, 1] = rows[3, 0] - 5e-3
    assert not compare_run([rows], [served(rows[:4], tokens=(4, 1))]).ok


def test_generated_positions_alone() -> None:
    rows = reference()[2:4].clone()
    assert compare_run([reference()], [served(rows, start=2)]).ok
    rows[1, 5] += 0.01
    report = compare_run([reference()], [served(rows, start=2)])
    assert report.where is not None
    assert (report.where.position, report.where.phase) == (3, "generated")
    assert "from 3 on" in str(report)


def test_the_worst_of_several_sequences() -> None:
    rows = reference()[:4].clone()
    rows[0, 0] += 0.5
    report = compare_run([reference(), reference()], [served(reference()[:4] + 0.1), served(rows)])
    assert report.where is not None
    assert report.where.sequence == 1


def test_nothing_compared_is_not_ok() -> None:
    report = compare_run([], [])
    assert not report.ok
    assert "nothing was compared" in str(report)


def test_another_number_of_sequences_is_refused() -> None:
    with pytest.raises(ComparisonError, match="2 reference sequences, 1 served"):
        compare_run([reference(), reference()], [served(reference()[:4])])


def test_another_length_is_refused() -> None:
    with pytest.raises(ComparisonError, match="has 4 positions, expected 5"):
        compare_run([reference()[:4]], [served(reference()[:4])])


def test_another_vocabulary_is_refused() -> None:
    with pytest.raises(ComparisonError, match="has 6 entries, the server's 5"):
        compare_run([reference()], [served(reference()[:4, :5])])


def test_a_sequence_with_a_position_missing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"shape \[4, vocab\].*found \[3, 6\]"):
        served(reference()[:3])


def test_a_sequence_without_prompt_or_with_a_start_beyond_it_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        Sequence((), (), torch.zeros(0, 6))
    with pytest.raises(ValueError, match=r"in \[0, 3\), found 3"):
        served(reference()[3:4], start=3)
