"""What is compared: a use of vLLM in our source, and what a build of vLLM has there.

A **path** names one thing without importing it: a module, a colon, then steps. ``.name`` reads an attribute, ``()`` is what a call gives
(an instance, for a class), ``[]`` an item of a container and ``[*]`` an element when it is iterated::

    vllm.config:VllmConfig().parallel_config.tensor_parallel_size
    vllm.v1.engine.llm_engine:LLMEngine.from_engine_args().step()[*].request_id

An option of ``vllm serve`` is written ``vllm-serve:max_model_len``, a compiled operator ``torch.ops._C:name``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

UseKind = Literal[
    "import", "attribute", "call", "subclass", "environment", "operator", "option", "write", "dynamic", "untyped"
]
FoundKind = Literal["module", "class", "function", "value", "outside", "unknown"]
ParameterKind = Literal["positional", "normal", "*", "keyword", "**"]

_STEP = re.compile(r"\(\)|\[\*\]|\[\]|[^.()\[\]:]+")


def attribute(path: str, name: str) -> str:
    """The path of `name` on what `path` leads to."""
    return f"{path}.{name}" if ":" in path else f"{path}:{name}"


def split(path: str) -> tuple[str, tuple[str, ...]]:
    """Module and steps of a path."""
    module, _, rest = path.partition(":")
    return module, tuple(_STEP.findall(rest))


def private_part(path: str) -> str | None:
    """The path up to its last private name, or None. A private module counts; a name with double underscores does not."""
    module, steps = split(path)
    if module.startswith("torch.ops"):
        return None
    last = None
    parts = module.split(".")
    for count, part in enumerate(parts, 1):
        if _is_private(part):
            last = ".".join(parts[:count])
    walked = module
    for step in steps:
        walked = walked + step if step in {"()", "[]", "[*]"} else attribute(walked, step)
        if _is_private(step):
            last = walked
    return last


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__"))


@dataclass(frozen=True, slots=True, order=True)
class Place:
    """Where a use stands: file below the packages' ``src`` folders, and line."""

    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


@dataclass(frozen=True, slots=True)
class CallShape:
    """How something is called: number of positional arguments, keyword names, names that may come through ``**``, and what is open."""

    positional: int = 0
    keywords: tuple[str, ...] = ()
    sometimes: tuple[str, ...] = ()
    has_star: bool = False
    has_double_star: bool = False

    def __str__(self) -> str:
        parts = ["_"] * self.positional + (["*_"] if self.has_star else [])
        parts += [f"{name}=" for name in self.keywords] + [f"[{name}=]" for name in self.sometimes]
        return f"({', '.join(parts + (['**_'] if self.has_double_star else []))})"


@dataclass(frozen=True, slots=True)
class Use:
    """One use of vLLM. For a call, `path` is what is called."""

    path: str
    kind: UseKind
    place: Place
    call: CallShape | None = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """Of a signature as the caller sees it: ``self`` is gone. `default` is source text, None when the argument is required."""

    name: str
    kind: ParameterKind
    default: str | None = None
    annotation: str = ""

    def __str__(self) -> str:
        text = self.name if self.kind in {"positional", "normal", "keyword"} else self.kind + self.name
        if self.annotation:
            text += f": {self.annotation}"
        return text if self.default is None else f"{text} = {self.default}"


Signature = tuple[Parameter, ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """What a path leads to in one build of vLLM.

    Args:
        where: module and qualified name of the definition, after re-exports and base classes.
        annotation: type of a value, as written there.
        signature: of the call, where our source calls it.
        body: digest of a called function's or class's source: a change is a reason to read it again, no fault by itself.
        value: of a literal that our own data repeats.
        bases: of a class that ours derive from, all of them.
        members: methods with their signatures, of an interface that our classes implement.
    """

    kind: FoundKind
    where: str
    annotation: str = ""
    signature: Signature | None = None
    body: str = ""
    value: object = None
    bases: tuple[str, ...] = ()
    members: dict[str, Signature] | None = None


@dataclass(frozen=True, slots=True)
class Entry:
    """Of a surface: alternatives that a path leads to (a union of types gives several), or why it leads nowhere."""

    definitions: tuple[Definition, ...] = ()
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Surface:
    """What one build of vLLM has at the paths that we use. `source` says what was read: ``vllm 0.33.0``."""

    source: str
    sha256: str
    entries: dict[str, Entry]
