"""What our own data and classes repeat of vLLM: tables of names, the entry-point group, the interface of a served model.

In: our source, read and not imported. Out: problems, for a surface in which the repeated thing has become another.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tf_tools.contract._data import Entry, Signature
from tf_tools.contract._errors import ContractError
from tf_tools.contract._signature import signature

_TABLES = "vllm.model_executor.models.registry"
_INTERFACE = "vllm.model_executor.models.interfaces_base:VllmModelForTextGeneration"


@dataclass(frozen=True, slots=True)
class Covered:
    """Every name in vLLM's table `path` (its keys, or the class names that it maps to) stands in one of our `tables` in `file`."""

    path: str
    file: str
    tables: tuple[str, ...]
    targets: bool = False


@dataclass(frozen=True, slots=True)
class Known:
    """Every name in our `table` in `file` (the values of a dict when `values`, else its keys) is a key of vLLM's table `path`."""

    path: str
    file: str
    table: str
    values: bool = False


@dataclass(frozen=True, slots=True)
class Group:
    """vLLM's constant `path` is a group of entry points in `file`, a ``pyproject.toml``."""

    path: str
    file: str


@dataclass(frozen=True, slots=True)
class Implemented:
    """Our class in `file` has every method of vLLM's interface `path`, and takes each parameter by name.

    `optional` are methods that vLLM documents as such, with what their absence means.
    """

    path: str
    file: str
    name: str
    optional: dict[str, str] = field(default_factory=dict, hash=False)


Claim = Covered | Known | Group | Implemented

CLAIMS: tuple[Claim, ...] = (
    Covered(f"{_TABLES}:_TRANSFORMERS_BACKEND_MODELS", "tf_backend/names.py", ("SERVED", "REFUSED")),
    Covered(f"{_TABLES}:_TRANSFORMERS_SUPPORTED_MODELS", "tf_backend/names.py", ("SERVED", "REFUSED"), targets=True),
    Known(
        "vllm.model_executor.model_loader:_LOAD_FORMAT_TO_MODEL_LOADER", "tf_backend/weights/checkpoint.py", "_SUFFIXES"
    ),
    Known(
        "vllm.model_executor.layers.activation:_ACTIVATION_AND_MUL_REGISTRY",
        "vllm_layers_bridge/layers/activation.py",
        "FUSED_ACTIVATIONS",
        values=True,
    ),
    Group("vllm.plugins:DEFAULT_PLUGINS_GROUP", "tf-backend/pyproject.toml"),
    *(
        Implemented(
            _INTERFACE,
            "tf_backend/model/served.py",
            name,
            {
                "is_unused_checkpoint_weight": "no weight is filtered before our loader sees it, which is what it expects"
            },
        )
        for name in ("TransformersForCausalLM", "_Refusing")
    ),
    Implemented(
        "vllm.model_executor.models.interfaces:MixtureOfExperts", "tf_backend/model/balance.py", "BalancedExperts"
    ),
)


def claim_problems(claim: Claim, entry: Entry, packages: Path) -> Iterator[str]:
    """Where `claim` fails for what a build has at its path; `packages` is the folder of our packages."""
    for definition in entry.definitions[:1]:
        match claim:
            case Covered():
                theirs = _names(definition.value, claim.targets)
                missing = sorted(theirs - _our_names(_source(packages, claim.file), claim.tables))
                if missing or not theirs:
                    what = f"`{'`, `'.join(missing)}`" if missing else "a table that is not literal any more"
                    yield f"{' and '.join(claim.tables)} of {claim.file} lack {what}"
            case Known():
                ours = _table(_source(packages, claim.file), claim.table, claim.values)
                missing = sorted(ours - _names(definition.value, targets=False))
                if missing or not ours:
                    what = f"`{'`, `'.join(missing)}`" if missing else "nothing that can be read"
                    yield f"{claim.table} of {claim.file} has {what}, which this table lacks"
            case Group():
                groups = tomllib.loads((packages / claim.file).read_text())["project"]["entry-points"]
                if definition.value not in groups:
                    yield f"{claim.file} has entry points in {', '.join(groups)}, and none in `{definition.value}`"
            case Implemented():
                yield from _lacking(claim, definition.members or {}, _source(packages, claim.file))


def _source(packages: Path, file: str) -> ast.Module:
    found = list(packages.glob(f"*/src/{file}"))
    if len(found) != 1:
        raise ContractError(f"a claim is about {file}, and {len(found)} packages have such a file")
    return ast.parse(found[0].read_bytes(), filename=file)


def _names(value: object, targets: bool) -> set[str]:
    if not isinstance(value, dict):
        return set()
    return {str(target[-1]) for target in value.values()} if targets else {str(key) for key in value}


def _our_names(tree: ast.Module, tables: tuple[str, ...]) -> set[str]:
    return {name for table in tables for name in _table(tree, table, values=False)}


def _table(tree: ast.Module, table: str, values: bool) -> set[str]:
    """Names in a literal table of ours: of a sequence its items, of a dict its keys or its values."""
    for node in tree.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
            if isinstance(target, ast.Name) and target.id == table:
                found = ast.literal_eval(node.value)
                return set(map(str, found.values() if values else found))
    return set()


def _lacking(claim: Implemented, interface: dict[str, Signature], tree: ast.Module) -> Iterator[str]:
    methods = _methods(tree, claim.name)
    if not interface:
        yield f"{claim.path} has no methods any more, and {claim.name} is made to its measure"
    for name, wanted in interface.items():
        ours = methods.get(name)
        if ours is None:
            if name not in claim.optional:
                yield f"{claim.name} has no method `{name}`"
            continue
        taken = {one.name for one in ours if one.kind in {"normal", "keyword"}}
        absent = [one.name for one in wanted if one.kind in {"normal", "keyword"} and one.name not in taken]
        if absent and not any(one.kind == "**" for one in ours):
            yield f"`{claim.name}.{name}` takes no `{'`, `'.join(absent)}`"
        extra = [one.name for one in ours if one.default is None and one.kind not in {"*", "**"}]
        given = {one.name for one in wanted}
        if any(one not in given for one in extra):
            yield f"`{claim.name}.{name}` needs `{'`, `'.join(one for one in extra if one not in given)}`, which vLLM does not give"


def _methods(tree: ast.Module, name: str) -> dict[str, Signature]:
    classes = {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
    if name not in classes:
        raise ContractError(f"a claim is about class {name}, which its file does not define")
    return {
        node.name: signature(node, is_bound=True) for node in classes[name].body if isinstance(node, ast.FunctionDef)
    }
