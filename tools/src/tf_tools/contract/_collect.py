"""Every use of vLLM in our packages, found by walking their source.

In: the packages' ``src`` folders. Out: `Use`s with file and line, and the rows of `_typed` that nothing matches. Counted as a use: an
import, an attribute read (``getattr`` and ``hasattr`` with a literal name included), a call with its shape, a base class, something
written to, the name of an environment variable, a compiled operator, an option of ``vllm serve`` that a message names. A name that is
not literal is a use of kind `dynamic`, and an attribute of what is called like an engine's config, but of unknown type, one of kind
`untyped`: nobody can check those.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tf_tools.contract._data import CallShape, Place, Use, UseKind, attribute
from tf_tools.contract._options import NAMESPACE, added_options
from tf_tools.contract._typed import TYPED, Typed
from tf_tools.contract._values import NOTHING, Names, Value

_VARIABLE = re.compile(r"VLLM_[A-Z0-9_]+")
_OPTION = re.compile(r"(?<![\w-])--([a-z][a-z0-9-]*[a-z0-9])")
_ENGINE_NAMES = re.compile(r"(vllm|model|cache|quant|parallel|load|compilation|scheduler|speculative)_config")
_CHANGES = {"append", "extend", "insert", "update", "setdefault", "pop", "popitem", "clear", "remove", "discard", "add"}
_MODULES = {"importlib.import_module", "import_module", "importlib.util.find_spec", "find_spec", "pytest.importorskip"}


@dataclass(frozen=True, slots=True)
class Uses:
    """All uses, in order of file and line, and rows of `_typed` that no expression of the source matches any more."""

    uses: tuple[Use, ...]
    stale: tuple[Typed, ...]


def collect(roots: Iterable[Path], rows: tuple[Typed, ...] = TYPED) -> Uses:
    """Uses in all Python files below `roots`, each a ``src`` folder."""
    found: list[Use] = []
    matched: set[Typed] = set()
    files = {file: root for root in roots for file in sorted(root.rglob("*.py"))}
    trees = {file: ast.parse(file.read_bytes(), filename=file.name) for file in files}
    own_options = frozenset(name for tree in trees.values() for name in added_options(tree))
    for file, root in files.items():
        name = file.relative_to(root).as_posix()
        collector = Collector(name, tuple(row for row in rows if row.file == name), own_options)
        collector.visit(trees[file])
        found += collector.uses
        matched |= collector.names.matched
    unique = dict.fromkeys(found)
    return Uses(tuple(sorted(unique, key=lambda use: use.place)), tuple(row for row in rows if row not in matched))


class Collector(ast.NodeVisitor):
    """Uses in one file, named `file` in their places."""

    def __init__(self, file: str, rows: tuple[Typed, ...] = (), own_options: frozenset[str] = frozenset()) -> None:
        self.uses: list[Use] = []
        self.names = Names(file, rows)
        self._own_options = own_options
        self._literal_keys: dict[str, list[str] | None] = {}
        """Keys of the tables that names of the current function stand for; None once something else may be in them."""

    def _add(self, value: Value, kind: UseKind, node: ast.expr | ast.stmt, call: CallShape | None = None) -> None:
        for path in sorted(value.paths):
            self.uses.append(Use(path, kind, Place(self.names.file, node.lineno), call))

    def visit(self, node: ast.AST) -> None:
        """Visit a node; what a row of `_typed` says of it is a use itself."""
        if isinstance(node, ast.expr):
            for row in self.names.rows_for(node):
                self._add(Value(frozenset({row.path} if row.path else {})), "attribute", node)
        super().visit(node)

    # Imports

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            if _is_vllm(alias.name):
                self._add(Value(frozenset({alias.name})), "import", node)
                bound = alias.name if alias.asname else "vllm"
                self.names.bind(alias.asname or "vllm", Value(frozenset({bound})))

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        if node.level == 0 and _is_vllm(node.module or ""):
            for alias in node.names:
                value = Value(frozenset({attribute(node.module or "", alias.name)}))
                self._add(value, "dynamic" if alias.name == "*" else "import", node)
                self.names.bind(alias.asname or alias.name, value)

    # Scopes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for base in node.bases:
            self._add(self.names.infer(base), "subclass", base)
        self._decorated(node)
        for part in (*node.bases, *(keyword.value for keyword in node.keywords)):
            self.visit(part)
        self.names.attributes.append({})
        with_init_first = sorted(node.body, key=lambda one: getattr(one, "name", "__init__") != "__init__")
        self._scope(node.name, with_init_first)
        self.names.attributes.pop()

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self._decorated(node)
        arguments = node.args
        parameters = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
        for default in (*arguments.defaults, *(one for one in arguments.kw_defaults if one is not None)):
            self.visit(default)
        bound = {one.arg: self.names.annotated(one.annotation) for one in parameters}
        self._scope(node.name, node.body, bound)

    visit_AsyncFunctionDef = visit_FunctionDef

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.names.scopes.append({one.arg: NOTHING for one in node.args.args})
        self.visit(node.body)
        self.names.scopes.pop()

    def _scope(self, name: str, body: Iterable[ast.stmt], bound: dict[str, Value] | None = None) -> None:
        self.names.scopes.append(dict(bound or {}))
        self.names.qualname.append(name)
        branches, self.names.branches = self.names.branches, 0
        keys, self._literal_keys = self._literal_keys, {}
        for statement in body:
            self.visit(statement)
        self._literal_keys = keys
        self.names.branches = branches
        self.names.qualname.pop()
        self.names.scopes.pop()

    def _decorated(self, node: ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for decorator in node.decorator_list:
            if not isinstance(decorator, ast.Call):
                self._add(self.names.infer(decorator), "call", decorator, CallShape(positional=1))
            self.visit(decorator)

    # Branches: a name keeps what it may have been before

    def _branch(self, node: ast.AST) -> None:
        self.names.branches += 1
        self.generic_visit(node)
        self.names.branches -= 1

    visit_If = visit_While = visit_Try = visit_Match = _branch

    def visit_With(self, node: ast.With | ast.AsyncWith) -> None:
        for item in node.items:
            self.visit(item.context_expr)
            entered = item.optional_vars
            if isinstance(entered, ast.Name):
                self.names.bind(entered.id, NOTHING)
                # What entering gives is seldom annotated: a row has to say it.
                if self.names.infer(item.context_expr).paths and not self.names.rows_for(entered):
                    text = f"{ast.unparse(item.context_expr)} as {entered.id}"
                    self._add(Value(frozenset({text})), "untyped", entered)
        for statement in node.body:
            self.visit(statement)

    visit_AsyncWith = visit_With

    def visit_For(self, node: ast.For | ast.AsyncFor) -> None:
        self.visit(node.iter)
        self.names.branches += 1
        self._bind(node.target, self.names.infer(node.iter).step("[*]"))
        for statement in (*node.body, *node.orelse):
            self.visit(statement)
        self.names.branches -= 1

    visit_AsyncFor = visit_For

    def _comprehension(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp | ast.DictComp) -> None:
        self.names.scopes.append({})
        for generator in node.generators:
            self.visit(generator.iter)
            self._bind(generator.target, self.names.infer(generator.iter).step("[*]"))
            for condition in generator.ifs:
                self.visit(condition)
        for part in (node.key, node.value) if isinstance(node, ast.DictComp) else (node.elt,):
            self.visit(part)
        self.names.scopes.pop()

    visit_ListComp = visit_SetComp = visit_GeneratorExp = visit_DictComp = _comprehension

    # Assignments

    def visit_Assign(self, node: ast.Assign) -> None:
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self._literal_keys[target.id] = self._keys(node.value)
            self._bind(target, self.names.infer(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        value = self.names.infer(node.value)
        self._bind(node.target, value if value.paths else self.names.annotated(node.annotation))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        self._bind(node.target, self.names.infer(node.value))

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.visit(node.value)
        self._written(node.target)

    def visit_Delete(self, node: ast.Delete) -> None:
        for target in node.targets:
            self._written(target)

    def _bind(self, target: ast.expr, value: Value) -> None:
        match target:
            case ast.Name(id=name):
                self.names.bind(name, value)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                for part in parts:
                    self._bind(part, value.step("[*]"))
            case ast.Attribute(value=ast.Name(id="self"), attr=attr) if self.names.attributes:
                known = self.names.attributes[-1].get(attr, NOTHING)
                self.names.attributes[-1][attr] = known | value
            case _:
                self._written(target)

    def _written(self, target: ast.expr) -> None:
        match target:
            case ast.Attribute(value=base, attr=attr):
                self._add(self.names.infer(base).step(attr), "write", target)
                self.visit(base)
            case ast.Subscript(value=base, slice=key):
                if isinstance(base, ast.Name):
                    self._literal_keys[base.id] = None
                if ast.unparse(base) == "sys.modules" and isinstance(key, ast.Constant) and _is_vllm(str(key.value)):
                    self._add(Value(frozenset({str(key.value)})), "write", target)
                self._add(self.names.infer(base), "write", target)
                self.visit(base)
                self.visit(key)

    # Expressions

    def visit_Attribute(self, node: ast.Attribute) -> None:
        value = self.names.infer(node)
        is_own = isinstance(node.value, ast.Name) and node.value.id == "self"
        if not is_own and not self.names.rows_for(node):
            is_operator = any(path.startswith("torch.ops.") for path in value.paths)
            self._add(value, "operator" if is_operator else "attribute", node)
            if not value.paths and isinstance(node.value, ast.Name) and _ENGINE_NAMES.fullmatch(node.value.id):
                self._add(Value(frozenset({f"{node.value.id}.{node.attr}"})), "untyped", node)
        self.visit(node.value)

    def visit_Constant(self, node: ast.Constant) -> None:
        if not isinstance(node.value, str):
            return
        if _VARIABLE.fullmatch(node.value):
            self._add(Value(frozenset({attribute("vllm.envs", node.value)})), "environment", node)
        for named in _OPTION.findall(node.value):
            option = named.replace("-", "_")
            if option not in self._own_options | {"help"}:
                self._add(Value(frozenset({attribute(NAMESPACE, option)})), "option", node)

    def visit_Call(self, node: ast.Call) -> None:
        function, rows = ast.unparse(node.func), self.names.rows_for(node)
        match node.args:
            case [target, name, *_] if function in {"getattr", "hasattr", "setattr", "delattr"} and not rows:
                self._by_name(function, target, name, node)
            case [_, ast.Tuple(elts=bases), _] if function == "type":
                for base in bases:
                    self._add(self.names.infer(base), "subclass", base)
            case [ast.Constant(value=str(module)), *_] if function in _MODULES and _is_vllm(module):
                self._add(Value(frozenset({module})), "import", node)
            case [] if isinstance(node.func, ast.Attribute) and node.func.attr == "set_defaults":
                if any(path.startswith("vllm.") for path in self.names.infer(node.func.value).paths):
                    for keyword in node.keywords:
                        self._add(Value(frozenset({attribute(NAMESPACE, keyword.arg or "")})), "option", node)
            case [target, *_] if function in {"dataclasses.replace", "replace"}:
                for keyword in node.keywords:
                    if keyword.arg is not None:
                        self._add(self.names.infer(target).step(keyword.arg), "attribute", node)
        called = self.names.called(node)
        self._add(called, "call", node, self._shape(node))
        if isinstance(node.func, ast.Attribute) and node.func.attr in _CHANGES:
            self._add(self.names.infer(node.func.value), "write", node)
        if rows and isinstance(node.func, ast.Attribute):  # the row has said what it is
            self.visit(node.func.value)
        else:
            self.visit(node.func)
        for part in (*node.args, *(keyword.value for keyword in node.keywords)):
            self.visit(part)

    def _by_name(self, function: str, target: ast.expr, name: ast.expr, node: ast.Call) -> None:
        value = self.names.infer(target)
        if isinstance(name, ast.Constant) and isinstance(name.value, str):
            self._add(value.step(name.value), "write" if function in {"setattr", "delattr"} else "attribute", node)
        else:
            self._add(value, "write" if function in {"setattr", "delattr"} else "dynamic", node)

    def _shape(self, node: ast.Call) -> CallShape:
        sometimes: list[str] = []
        is_open = False
        for keyword in node.keywords:
            if keyword.arg is None:
                keys = self._keys(keyword.value)
                is_open |= keys is None
                sometimes += keys or []
        return CallShape(
            positional=sum(not isinstance(one, ast.Starred) for one in node.args),
            keywords=tuple(one.arg for one in node.keywords if one.arg is not None),
            sometimes=tuple(sometimes),
            has_star=any(isinstance(one, ast.Starred) for one in node.args),
            has_double_star=is_open,
        )

    def _keys(self, node: ast.expr) -> list[str] | None:
        """Keys of a mapping passed with ``**``: of a literal, or of a name that is assigned literals in the same function."""
        match node:
            case ast.Dict(keys=keys) if all(isinstance(key, ast.Constant) for key in keys):
                return [str(key.value) for key in keys if isinstance(key, ast.Constant)]
            case ast.IfExp(body=body, orelse=orelse):
                first, second = self._keys(body), self._keys(orelse)
                return None if first is None or second is None else [*first, *second]
            case ast.Name(id=name):
                return self._literal_keys.get(name)
        return None


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def sources(packages: Path) -> Iterator[Path]:
    """The ``src`` folder of every package below `packages`."""
    yield from sorted(folder / "src" for folder in packages.iterdir() if (folder / "src").is_dir())
