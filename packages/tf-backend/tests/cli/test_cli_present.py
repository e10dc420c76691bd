"""Which error of a chain is shown."""

from __future__ import annotations

from tf_backend.cli._present import EngineFailed, describe
from tf_backend.errors import CheckpointError, EngineMissing


def _wrapped(inner: Exception, *, explicit: bool = True) -> RuntimeError:
    try:
        try:
            raise inner
        except Exception as error:
            if explicit:
                raise RuntimeError("Engine core initialization failed. See root cause above.") from error
            raise RuntimeError("during cleanup")  # noqa: B904
    except RuntimeError as outer:
        return outer


def test_our_error_is_found_however_the_engine_wrapped_it() -> None:
    ours = CheckpointError("tensor missing", tensor="lm_head.weight")
    for explicit in (True, False):
        failed = EngineFailed("starting", _wrapped(ours, explicit=explicit))
        assert describe(failed) == str(ours)
        assert describe(_wrapped(failed)) == str(ours)


def test_an_error_of_the_engine_shows_its_root_cause() -> None:
    text = describe(EngineFailed("starting", _wrapped(ValueError("No available memory\nfor the cache blocks."))))
    assert text.startswith("the engine failed while starting: ValueError: No available memory for the cache blocks.")
    assert "--verbose" in text


def test_fields_that_the_engine_does_not_take_are_named_in_few_words() -> None:
    import pydantic

    class Options(pydantic.BaseModel):
        bits: int
        group: int = 0

        @pydantic.model_validator(mode="after")
        def check(self) -> Options:
            raise ValueError("a group is wanted.")

    def failing(**values: object) -> str:
        try:
            Options(**values)  # type: ignore[arg-type]
        except pydantic.ValidationError as error:
            return describe(EngineFailed("being configured", error, advice="See."))
        return ""

    begin = "the engine failed while being configured: ValidationError: "
    wrong_type = "Input should be a valid integer, unable to parse string as an integer"
    assert failing(group="x") == f"{begin}bits: Field required; group: {wrong_type}. See."
    assert failing(bits=4) == f"{begin}a group is wanted. See."


def test_an_error_without_words_is_named() -> None:
    assert "AssertionError. Its log" in describe(EngineFailed("starting", AssertionError()))


def test_a_message_is_one_line() -> None:
    assert "\n" not in describe(EngineMissing("the demo"))
    assert "\n" not in describe(ValueError("a\nb"))


def test_a_chain_that_bites_its_tail_ends() -> None:
    first, second = ValueError("first"), ValueError("second")
    first.__context__, second.__context__ = second, first
    assert "first" in describe(first)
