"""Which fields of a config are named when no model can be made of it, on attempts of a few lines."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import pytest
from tf_backend.model import blame
from tf_backend.model.blame import Blame, find_blame, find_size_to_blame

GOOD = {"model_type": "toy", "width": 64, "heads": 4, "act": "silu", "rope": {"type": "plain", "base": 10}}


def build(values: dict[str, Any]) -> None:
    """A constructor with defaults, as those of configs and models are."""
    rope = values.get("rope", {})
    if rope.get("type", "plain") == "scaled":
        rope["factor"]
    heads, width = values.get("heads", 12), values.get("width", 96)
    if width % heads:
        raise ValueError(f"{width} is no multiple of {heads}")
    {"silu": 1}[values.get("act", "silu")]
    if width < 0:
        raise RuntimeError(f"negative dimension {width}")


@pytest.mark.parametrize(
    ("wrong", "remedy"),
    [
        ({"act": "nope"}, 'Correct "act": "nope" there.'),
        ({"heads": 0}, 'Correct "heads": 0 there.'),
        ({"width": -4}, 'Correct "width": -4 there.'),
        ({"heads": 3}, 'Correct one of "width": 64, "heads": 3 there.'),
        ({"heads": None}, 'Correct "heads": null there.'),
        ({"rope": {"type": "scaled", "base": 10}}, 'Correct "rope.type": "scaled", or what goes with it, there.'),
        ({"rope": "x"}, 'Correct "rope": "x" there.'),
        ({"heads": 0, "act": "nope"}, 'Correct "heads": 0 and "act": "nope" there.'),
        ({"heads": 0, "act": "nope", "rope": None}, 'Correct "rope": null there.'),
        (
            {"heads": 0, "act": "nope", "rope": {"type": "scaled"}},
            'Correct "rope.type": "scaled", or what goes with it, there.',
        ),
        ({"width": -60, "act": "nope", "heads": 7}, 'Correct "width": -60 there.'),
        ({"act": "a" * 99}, f'Correct "act": "{"a" * 57} … there.'),
    ],
    ids=str,
)
def test_the_fields_by_whose_change_it_can_be_made(wrong: dict[str, Any], remedy: str) -> None:
    values = {**GOOD, **wrong}
    assert find_blame(values, build).remedy() == remedy
    assert values == {**GOOD, **wrong}


def test_of_attempts_that_take_their_time_only_sizes_that_are_none_are_tried() -> None:
    made: list[dict[str, Any]] = []

    def attempt(values: dict[str, Any]) -> None:
        made.append(values)
        build(values)

    found = find_size_to_blame({**GOOD, "heads": 0, "offset": 0, "eps": 0.0, "tied": False}, attempt)
    assert found.remedy("in config.json") == 'Correct "heads": 0 in config.json.'
    assert [values.get("heads") for values in made] == [None, 1, 0, 0]
    assert not find_size_to_blame({**GOOD, "act": "nope"}, attempt)
    assert len(made) == 4


def test_nothing_is_to_blame_where_it_can_be_made_or_never_can() -> None:
    def never(values: dict[str, Any]) -> None:
        raise OSError("no disk")

    for attempt in (build, never):
        found = find_blame(GOOD, attempt)
        assert not found
        assert found.remedy() == "Correct the values there."


def test_what_any_change_would_cure_is_blamed_on_none() -> None:
    def whole(values: dict[str, Any]) -> None:
        if len(values) == 7:
            raise ValueError

    assert find_blame({f"field_{at}": "x" for at in range(7)}, whole) == Blame()


def test_what_says_which_model_it_is_is_never_left_out() -> None:
    def odd(values: dict[str, Any]) -> None:
        if values.get("model_type") == "toy":
            raise ValueError

    assert not find_blame(GOOD, odd)


def test_no_attempt_is_made_after_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blame, "_LONGEST", -1.0)
    made: list[dict[str, Any]] = []

    def attempt(values: dict[str, Any]) -> None:
        made.append(values)
        build(values)

    assert not find_blame({**GOOD, "act": "nope"}, attempt)
    assert len(made) == 1


def test_attempts_are_silent_and_the_silence_ends(caplog: pytest.LogCaptureFixture) -> None:
    def loud(values: dict[str, Any]) -> None:
        logging.getLogger("toy").error("loud")
        warnings.warn("loud", stacklevel=1)
        build(values)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert find_blame({**GOOD, "act": "nope"}, loud)
    assert caplog.records == []
    logging.getLogger("toy").error("after")
    assert [record.message for record in caplog.records] == ["after"]
