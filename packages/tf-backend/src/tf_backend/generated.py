"""The namespace of rewritten classes: a module with a fused forward is an instance of a class that lives here.

In: an original class and its rewritten forward. Out: a subclass with the same `__name__`, whose `__qualname__` carries the hash of
the rewritten text, found again as `tf_backend.generated.<Name>_<hash>`. `isinstance` and `super()` still hold. A pickled module
carries the edits as data: the process that loads it applies them to its own source of the original class and compares both
hashes, so that a module is fused there by the same text or not at all.
"""

from __future__ import annotations

import importlib
import threading
from dataclasses import dataclass
from typing import Any

import ast_rewrite
from ast_rewrite import CompiledRewrite, Edit
from torch import nn

_classes: dict[str, type[nn.Module]] = {}
_lock = threading.Lock()


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a derived class comes from the original one: edits of the source with that hash, giving the text with this one."""

    original: type[nn.Module]
    edits: tuple[Edit, ...]
    source_sha256: str
    sha256: str


def derive(original: type[nn.Module], rewrite: CompiledRewrite) -> type[nn.Module]:
    """The subclass of `original` whose forward is `rewrite`; the same class for the same text, once a process."""
    recipe = Recipe(original, rewrite.edits, rewrite.source_sha256, rewrite.sha256)
    qualname = f"{original.__name__}_{rewrite.sha256[:24]}"
    with _lock:
        known = _classes.get(qualname)
        if known is not None and known.__mro__[1] is original:
            return known
        if known is not None:  # two originals of one name whose forwards became the same text
            qualname = f"{qualname}_{abs(hash((original.__module__, original.__qualname__))):x}"
        namespace = {
            "forward": rewrite.function,
            "__module__": __name__,
            "__qualname__": qualname,
            "__doc__": original.__doc__,
            "__reduce_ex__": _reduce,
            "tf_backend_recipe": recipe,
        }
        derived = type(original.__name__, (original,), namespace)
        _classes[qualname] = derived
        return derived


def _reduce(self: nn.Module, protocol: Any) -> tuple[Any, ...]:
    """Pickle by recipe: the class is derived again where it is loaded."""
    recipe: Recipe = vars(type(self))["tf_backend_recipe"]
    original = recipe.original
    return (
        _rebuild,
        (original.__module__, original.__qualname__, recipe.edits, recipe.source_sha256, recipe.sha256),
        self.__dict__,
    )


def _rebuild(module: str, qualname: str, edits: tuple[Edit, ...], source_sha256: str, sha256: str) -> nn.Module:
    """A bare instance of the derived class; raises `ast_rewrite.Refused` when this process would get another text."""
    original: Any = importlib.import_module(module)
    for part in qualname.split("."):
        original = getattr(original, part)
    rewrite = ast_rewrite.replay(original.forward, edits, source_sha256=source_sha256, sha256=sha256)
    derived = derive(original, rewrite)
    instance: nn.Module = derived.__new__(derived)
    return instance


def __getattr__(name: str) -> type[nn.Module]:
    try:
        return _classes[name]
    except KeyError:
        raise AttributeError(
            f"no rewritten class `{name}` was derived in this process: plan the model, or unpickle a module that has it"
        ) from None
