"""What is logged before an error of ours is not seen; all else is, in order, also through handlers that are made meanwhile."""

from __future__ import annotations

import io
import logging
import warnings

import pytest
from tf_backend.cli._held_logs import held_logs
from tf_backend.cli._present import EngineFailed
from tf_backend.errors import OptionRefused

LOG = logging.getLogger("toy_engine")


def fail(error: BaseException) -> None:
    LOG.error("noise")
    warnings.warn("noise", stacklevel=1)
    raise error


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """What a handler of the logger writes."""
    text = io.StringIO()
    monkeypatch.setattr(LOG, "handlers", [logging.StreamHandler(text)])
    monkeypatch.setattr(LOG, "propagate", False)
    return text


def test_a_block_that_ends_well_shows_all_after_it(shown: io.StringIO) -> None:
    with held_logs():
        LOG.warning("one %d", 1)
        later = logging.StreamHandler(shown)
        LOG.handlers = [later]
        LOG.warning("two")
        assert shown.getvalue() == ""
    assert shown.getvalue() == "one 1\ntwo\n"
    LOG.warning("three")
    assert shown.getvalue() == "one 1\ntwo\nthree\n"


@pytest.mark.parametrize("error", [OptionRefused("no"), EngineFailed("starting", OptionRefused("no"))])
def test_an_error_of_ours_is_all_that_is_seen(error: Exception, shown: io.StringIO) -> None:
    with pytest.raises(type(error)), held_logs():
        fail(error)
    assert shown.getvalue() == ""
    LOG.error("after")
    assert shown.getvalue() == "after\n"


@pytest.mark.parametrize("error", [ValueError("x"), EngineFailed("starting", ValueError("x")), SystemExit(0)])
@pytest.mark.filterwarnings("ignore:noise")
def test_before_any_other_end_the_log_is_shown(error: BaseException, shown: io.StringIO) -> None:
    with pytest.raises(type(error)), held_logs():
        fail(error)
    assert shown.getvalue() == "noise\n"


@pytest.mark.filterwarnings("ignore:noise")
def test_on_request_nothing_is_held_back(shown: io.StringIO) -> None:
    with pytest.raises(OptionRefused), held_logs(shown=True):
        fail(OptionRefused("no"))
    assert shown.getvalue() == "noise\n"


def test_warnings_are_held_too() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        with held_logs():
            warnings.warn("slow", stacklevel=1)
            assert seen == []
        assert [str(warning.message) for warning in seen] == ["slow"]
        with pytest.raises(OptionRefused), held_logs():
            fail(OptionRefused("no"))
        assert len(seen) == 1
