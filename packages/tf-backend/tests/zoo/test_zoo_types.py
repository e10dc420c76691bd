"""Which model types there are, and how they are chosen."""

from __future__ import annotations

import pytest
from tf_backend.errors import OptionRefused
from tf_backend.zoo.types import KINDS, entries, select


def test_every_kind_has_entries_and_every_name_is_there_once() -> None:
    found = entries()
    assert {entry.kind for entry in found} == set(KINDS)
    assert len({entry.name for entry in found}) == len(found) > 400
    assert ("causal/llama", "LlamaForCausalLM") in {(entry.name, entry.architecture) for entry in found}


def test_a_type_is_chosen_in_all_its_roles_and_a_full_name_in_one() -> None:
    assert {entry.name for entry in select(["bert"])} >= {"causal/bert", "encoder/bert", "classification/bert"}
    assert [entry.name for entry in select(["encoder/bert"])] == ["encoder/bert"]


def test_wildcards_and_kinds() -> None:
    found = select(["qwen3*"], ["causal"])
    assert {"causal/qwen3", "causal/qwen3_moe"} <= {entry.name for entry in found}
    assert all(entry.name.startswith("causal/qwen3") for entry in found)
    assert {entry.kind for entry in select(kinds=["encoder"])} == {"encoder"}


@pytest.mark.parametrize(
    ("names", "kinds", "said"),
    [
        (["lama"], [], "`llama`"),
        (["causal/lama"], [], "`causal/llama`"),
        (["layoutlm"], ["causal"], "of kind causal"),
        (["llama", "nosuchtype"], [], "nosuchtype"),
        ([], ["decoder"], "image-text"),
    ],
)
def test_what_fits_nothing_is_an_error_that_names_it(names: list[str], kinds: list[str], said: str) -> None:
    with pytest.raises(OptionRefused, match=said):
        select(names, kinds)
