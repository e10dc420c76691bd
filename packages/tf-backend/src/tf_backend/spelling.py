"""The known name of which a word is a misspelling, if it is one.

In: a word and names. Out: a name that is a slip of the keyboard away, or nothing: a guess that is far-fetched sends its reader astray.

    meant_by("lama", ["llama", "gemma"])                        "llama"
    meant_by("LLaMAForCausalLM", ["LlamaForCausalLM"])          "LlamaForCausalLM"
    meant_by("NoSuchForCausalLM", ["MoshiForCausalLM"])         ""
"""

from __future__ import annotations

import re
from collections.abc import Iterable

_ONE, _TWO = 4, 10
"""Letters from which on a name may have a slip in it, and two. Shorter ones are too near to each other: gpt is no opt."""


def meant_by(word: str, known: Iterable[str]) -> str:
    """The nearest of `known` within a slip or two, case and separators aside; "" where there is none.

    A slip is a letter too many, one too few, another one, or two that changed places (Damerau 1964). Another number is none: it is
    another release.
    """
    plain = _plain(word)
    most = (len(plain) >= _ONE) + (len(plain) >= _TWO)
    near = ((_slips(plain, other), name) for name in known if _may_be(plain, other := _plain(name), most))
    slips, name = min(near, default=(most + 1, ""))
    return name if slips <= most else ""


def _may_be(one: str, other: str, most: int) -> bool:
    return abs(len(one) - len(other)) <= most and re.sub(r"\D", "", one) == re.sub(r"\D", "", other)


def _plain(name: str) -> str:
    return re.sub(r"[-_. ]", "", name).casefold()


def _slips(one: str, other: str) -> int:
    """The distance of two words in slips, each letter touched by one at most (optimal string alignment)."""
    before: list[int] = []
    row = list(range(len(other) + 1))
    for i, letter in enumerate(one, 1):
        before, last, row = row, before, [i]
        for j, wanted in enumerate(other, 1):
            best = min(before[j] + 1, row[j - 1] + 1, before[j - 1] + (letter != wanted))
            if i > 1 and j > 1 and letter == other[j - 2] and one[i - 2] == wanted:
                best = min(best, last[j - 2] + 1)
            row.append(best)
    return row[-1]
