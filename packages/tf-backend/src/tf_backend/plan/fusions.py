"""The list of fusions: data, in order of priority. Packages add theirs through the entry-point group `tf_backend.fusions`.

In: what is installed. Out: fusion objects. An entry point names a fusion object, or a function that returns several.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from vllm_layers_bridge.fusions import FUSIONS
from vllm_layers_bridge.fusions.protocol import Fusion

from tf_backend.errors import TfBackendError

GROUP = "tf_backend.fusions"


@cache
def installed_fusions() -> tuple[Fusion, ...]:
    """Fusions of this project first, then those of other packages in order of name.

    Raises:
        TfBackendError: an entry point does not load, is no fusion, or takes a name that is taken.
    """
    found: list[Fusion] = list(FUSIONS)
    for point in sorted(entry_points(group=GROUP), key=lambda p: (p.dist.name if p.dist else "", p.name)):
        try:
            loaded: Any = point.load()
        except Exception as error:
            raise TfBackendError(f"the fusion `{point.name}` ({point.value}) cannot be loaded: {error}") from error
        for fusion in _several(loaded):
            if not isinstance(fusion, Fusion):
                raise TfBackendError(
                    f"`{point.value}` is no fusion: it lacks a part of vllm_layers_bridge.fusions.protocol.Fusion"
                )
            if any(fusion.name == known.name for known in found):
                raise TfBackendError(
                    f"`{point.value}` is named `{fusion.name}`, and there is a fusion of that name already"
                )
            found.append(fusion)
    return tuple(found)


def _several(loaded: Any) -> Iterable[Any]:
    if isinstance(loaded, Fusion) and not isinstance(loaded, type):
        return (loaded,)
    if callable(loaded):
        loaded = loaded()
    return loaded if isinstance(loaded, list | tuple) else (loaded,)
