"""Signatures as a caller sees them, read from source, and whether a call fits one.

In: a function or class of vLLM, and the shape of a call of ours. Out: parameters; the reason why the call does not fit.
"""

from __future__ import annotations

import ast

from tf_tools.contract._classes import Names, decorator_name, lineage, own_members, statements
from tf_tools.contract._data import CallShape, Parameter, ParameterKind, Signature
from tf_tools.contract._things import Function, Thing

_FIELD_DECORATORS = {"dataclass", "config"}
_FIELD_BASES = {"NamedTuple", "BaseModel", "Struct", "TypedDict"}
_NO_CONSTRUCTOR = {"ABC", "Protocol", "Generic", "object"}
_KEYWORD_ONLY_BASES = {"BaseModel", "TypedDict"}


def constructor(cls: Thing, names: Names) -> Signature | None:
    """Parameters of ``cls(...)``; None when another library's base makes it."""
    line = lineage(cls, names)
    for index, one in enumerate(line):
        if one.kind != "class":
            if one.kind == "unknown":
                return None
            continue
        init = own_members(one).get("__init__")
        if init is not None and isinstance(init.node, Function):
            return signature(init.node, is_bound=True)
        if _has_fields(one, line):
            return _fields(line[index:], names)
    has_no_own = all(one.kind == "class" or one.where.rpartition(".")[2] in _NO_CONSTRUCTOR for one in line)
    return () if has_no_own else None


def _has_fields(cls: Thing, line: list[Thing]) -> bool:
    assert isinstance(cls.node, ast.ClassDef)
    if any(decorator_name(one) in _FIELD_DECORATORS for one in cls.node.decorator_list):
        return True
    return any(one.kind == "outside" and one.where.rpartition(".")[2] in _FIELD_BASES for one in line)


def _fields(line: list[Thing], names: Names) -> Signature:
    keyword_only = any(one.kind == "outside" and one.where.rpartition(".")[2] in _KEYWORD_ONLY_BASES for one in line)
    fields: dict[str, Parameter] = {}
    for cls in reversed([one for one in line if one.kind == "class" and _has_fields(one, lineage(one, names))]):
        assert isinstance(cls.node, ast.ClassDef)
        options = [
            keyword for one in (*cls.node.decorator_list,) if isinstance(one, ast.Call) for keyword in one.keywords
        ]
        options += cls.node.keywords
        here = keyword_only or any(one.arg == "kw_only" and ast.unparse(one.value) == "True" for one in options)
        for node in statements(cls.node.body):
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                annotation = ast.unparse(node.annotation)
                default, is_parameter, by_keyword = _field_default(node.value)
                if is_parameter and not annotation.startswith(("ClassVar", "typing.ClassVar")):
                    kind: ParameterKind = "keyword" if here or by_keyword else "normal"
                    fields[node.target.id] = Parameter(node.target.id, kind, default, annotation)
    positional = [one for one in fields.values() if one.kind == "normal"]
    return (*positional, *(one for one in fields.values() if one.kind == "keyword"))


def _field_default(value: ast.expr | None) -> tuple[str | None, bool, bool]:
    """Default of a field, whether the constructor takes it, and whether by keyword alone."""
    if value is None:
        return None, True, False
    if isinstance(value, ast.Call) and decorator_name(value).lower() == "field":
        options = {one.arg: one.value for one in value.keywords}
        if "init" in options and ast.unparse(options["init"]) == "False":
            return None, False, False
        by_keyword = "kw_only" in options and ast.unparse(options["kw_only"]) == "True"
        given = options.get("default") or options.get("default_factory") or (value.args[0] if value.args else None)
        if given is None or (isinstance(given, ast.Constant) and given.value is ...):
            return None, True, by_keyword
        return ast.unparse(given), True, by_keyword
    return ast.unparse(value), True, False


def signature(node: Function, *, is_bound: bool) -> Signature:
    """Parameters of a function; the first is left out when `is_bound`."""
    arguments = node.args
    positional = [(one, "positional") for one in arguments.posonlyargs] + [(one, "normal") for one in arguments.args]
    defaults: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    defaults += arguments.defaults
    found = [
        Parameter(
            one.arg, "positional" if kind == "positional" else "normal", _text(default), _text(one.annotation) or ""
        )
        for (one, kind), default in zip(positional, defaults, strict=True)
    ]
    if is_bound:
        del found[:1]
    if arguments.vararg is not None:
        found.append(Parameter(arguments.vararg.arg, "*"))
    for one, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(one.arg, "keyword", _text(default), _text(one.annotation) or ""))
    if arguments.kwarg is not None:
        found.append(Parameter(arguments.kwarg.arg, "**"))
    return tuple(found)


def _text(node: ast.expr | None) -> str | None:
    return None if node is None else ast.unparse(node)


def misfit(call: CallShape, parameters: Signature) -> str | None:
    """Why `call` does not fit `parameters`; None when it does.

    A keyword that only ``**`` would take does not fit: nothing says that it is still understood.
    """
    named = {one.name: one for one in parameters if one.kind in {"normal", "keyword"}}
    places = [one for one in parameters if one.kind in {"positional", "normal"}]
    if call.positional > len(places) and not any(one.kind == "*" for one in parameters):
        return f"{call.positional} positional arguments are given, and it takes {len(places)}"
    filled = {one.name for one in places[: call.positional]}
    for name in (*call.keywords, *call.sometimes):
        if name not in named:
            rest = next((one.name for one in parameters if one.kind == "**"), None)
            return f"it has no parameter `{name}`" + (f", which would vanish in `**{rest}`" if rest else "")
        if name in filled:
            return f"`{name}` is given twice"
    filled.update(call.keywords)
    if call.has_star or call.has_double_star:
        return None
    needed = [one.name for one in parameters if one.kind not in {"*", "**"} and one.default is None]
    absent = [name for name in needed if name not in filled]
    return f"`{'`, `'.join(absent)}` must be given" if absent else None


def to_text(parameters: Signature) -> str:
    """A signature as Python writes it; `from_text` reads it back."""
    parts: list[str] = []
    for index, one in enumerate(parameters):
        earlier = parameters[index - 1].kind if index else ""
        if earlier == "positional" and one.kind != "positional":
            parts.append("/")
        if one.kind == "keyword" and earlier not in {"keyword", "*"}:
            parts.append("*")
        parts.append(str(one))
    if parameters and parameters[-1].kind == "positional":
        parts.append("/")
    return f"({', '.join(parts)})"


def from_text(text: str) -> Signature:
    """The signature that `to_text` wrote."""
    node = ast.parse(f"def f{text}: ...").body[0]
    assert isinstance(node, ast.FunctionDef)
    return signature(node, is_bound=False)
