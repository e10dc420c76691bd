import ast
import pickle

import pytest
from ast_rewrite import Refused, SourceSpan


def test_a_span_contains_itself_and_what_lies_in_it():
    outer = SourceSpan(2, 4, 3, 1)
    assert outer.contains(outer)
    assert outer.contains(SourceSpan(2, 9, 2, 12))
    assert not outer.contains(SourceSpan(2, 3, 2, 12))
    assert not SourceSpan(2, 9, 2, 12).contains(outer)


def test_spans_that_touch_do_not_overlap():
    assert SourceSpan(1, 0, 1, 4).overlaps(SourceSpan(1, 3, 2, 0))
    assert not SourceSpan(1, 0, 1, 4).overlaps(SourceSpan(1, 4, 1, 9))


def test_spans_sort_by_where_they_start():
    assert sorted([SourceSpan(2, 0, 2, 1), SourceSpan(1, 5, 9, 9)])[0].lineno == 1


def test_the_span_of_a_node_counts_bytes():
    assert SourceSpan.of(ast.parse("é + b").body[0].value.right) == SourceSpan(1, 5, 1, 6)


@pytest.mark.parametrize("numbers", [(0, 0, 1, 1), (1, -1, 1, 1), (2, 0, 1, 5), (1, 5, 1, 4)])
def test_numbers_that_are_no_span_are_an_error(numbers):
    with pytest.raises(ValueError, match="not a span"):
        SourceSpan(*numbers)


def test_a_refusal_keeps_its_reason_and_span_through_pickle():
    error = pickle.loads(pickle.dumps(Refused("why", SourceSpan(1, 2, 3, 4))))
    assert (error.reason, error.span) == ("why", SourceSpan(1, 2, 3, 4))
    assert "why (at 1:2-3:4)" in str(error)
