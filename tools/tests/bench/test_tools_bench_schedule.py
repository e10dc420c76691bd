"""Arms, their order and their cores."""

from __future__ import annotations

from collections import Counter

import pytest
from tf_tools.bench import KINDS, PRIME, BenchError, order, pair_starts, parse_arms
from tf_tools.bench._schedule import primes, slots


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_arm_is_at_each_place_equally_often(count: int) -> None:
    arms = tuple("abcd"[:count])
    places = Counter((arm, at) for pair in range(count * 3) for at, arm in enumerate(order(arms, pair)))
    assert set(places.values()) == {3}
    assert len(places) == count * count


def test_the_order_turns_from_pair_to_pair() -> None:
    assert [order(("a", "b", "c"), pair) for pair in range(3)] == [("a", "b", "c"), ("b", "c", "a"), ("c", "a", "b")]


def test_a_pair_stays_on_its_cores_and_each_order_meets_each_core() -> None:
    met: Counter[tuple[str, tuple[int, ...]]] = Counter()
    for pair in range(8):
        starts = pair_starts("eager", pair, ("ours", "native"), ((0,), (1,)))
        assert len({start.cores for start in starts}) == 1
        assert [start.position for start in starts] == [0, 1]
        met[starts[0].arm, starts[0].cores] += 1
    assert met == Counter({(arm, core): 2 for arm in ("ours", "native") for core in ((0,), (1,))})


def test_a_priming_start_is_there_once_for_each_arm() -> None:
    starts = primes("compiled", ("ours", "native"), ((3,), (4,)))
    assert [(start.arm, start.pair, start.cores) for start in starts] == [
        ("ours", PRIME, (3,)),
        ("native", PRIME, (3,)),
    ]


def test_slots_are_disjoint() -> None:
    assert slots((0, 1, 4, 5, 7), 2) == ((0, 1), (4, 5))
    assert slots((3,), 1) == ((3,),)


@pytest.mark.parametrize("threads", [0, 3])
def test_more_threads_than_cores_are_refused(threads: int) -> None:
    with pytest.raises(BenchError, match=f"{threads} threads on 2 cores"):
        slots((0, 1), threads)


def test_a_number_makes_another_arm_of_the_same_kind() -> None:
    ours, in_tree, again = parse_arms(("ours", "in-tree", "ours2"))
    assert ours.kind == again.kind
    assert ours.name != again.name
    assert in_tree.kind != ours.kind


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("ours", "theirs"), "unknown arm 'theirs'"),
        (("ours", "ours"), "a name of its own"),
        (("ours",), "nothing to be compared with"),
        ((), "nothing to be compared with"),
    ],
)
def test_arms_that_cannot_be_compared_are_refused(names: tuple[str, ...], words: str) -> None:
    with pytest.raises(BenchError, match=words):
        parse_arms(names)


SERVED = {
    "ours": "tf_backend.model.served.TransformersForCausalLM",
    "in-tree": "vllm.model_executor.models.transformers.TransformersForCausalLM",
    "native": "vllm.model_executor.models.llama.LlamaForCausalLM",
}


@pytest.mark.parametrize("served", sorted(SERVED))
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_an_arm_knows_its_own_model_class_alone(kind: object, served: str) -> None:
    found = next(one for one in KINDS if one is kind)
    refusal = found.refusal(SERVED[served])
    assert bool(refusal) == (found.name != served)
    assert not refusal or SERVED[served] in refusal
