"""Decorated functions: find the function at the bottom, and put another in its place.

A decorator that uses ``functools.wraps`` leaves ``__wrapped__``; one that does not hides the function in a closure cell.
Either way the wrapper that runs holds the function below it in a cell: that cell is what a rebuilt wrapper replaces.
The original wrappers are never touched.
"""

from __future__ import annotations

import inspect
import types

from ast_rewrite._errors import Refused, RewriteError, SourceUnavailable
from ast_rewrite._files import source_file


def chain(fn: object, *, unwrap: bool = True) -> tuple[types.FunctionType, ...]:
    """The functions from the outermost wrapper to the undecorated function; without `unwrap`, `fn` alone.

    Raises Refused where a wrapper is not a plain function, or where it is open which of its functions it wraps.
    """
    found: list[types.FunctionType] = []
    current: object = fn.__func__ if isinstance(fn, types.MethodType) else fn
    while current is not None:
        if not isinstance(current, types.FunctionType):
            if found or hasattr(current, "__wrapped__"):
                raise Refused(f"{_named(current)} is not a plain function, so it cannot be rebuilt around another one")
            raise SourceUnavailable(f"{_named(current)} is not a Python function: it has no source to rewrite")
        if any(current is known for known in found):
            raise Refused(f"{_named(current)} wraps itself")
        found.append(current)
        if not unwrap:
            break
        current = current.__dict__.get("__wrapped__") or _captured(current)
    if len(found) > 1:
        rebuilt(found[0], found[-1], found[-1])  # refuse now rather than when everything is edited
    return tuple(found)


def rebuilt(outer: types.FunctionType, inner: types.FunctionType, new: types.FunctionType) -> types.FunctionType:
    """The chain from `outer` down to `inner`, copied with `new` in the place of `inner`.

    Raises Refused if a wrapper reaches `inner` through no cell, through several, or through something else than a cell.
    """
    if outer is inner:
        return new
    cells = list(outer.__closure__ or ())
    holding = [(at, held) for at, cell in enumerate(cells) if _reaches(held := _content(cell), inner)]
    if len(holding) != 1 or any(_content(cell) is outer for cell in cells):
        raise Refused(
            f"the decorator {_named(outer)} holds {_named(inner)} in {len(holding) or 'none'} of its closure cells; "
            "expected exactly one, so that a new function can be put there"
        )
    others = [*(outer.__defaults__ or ()), *(outer.__kwdefaults__ or {}).values()]
    others += [value for name, value in outer.__dict__.items() if name != "__wrapped__"]
    if any(_reaches(value, inner) for value in others):
        raise Refused(f"the decorator {_named(outer)} also holds {_named(inner)} in a default or an attribute")
    at, held = holding[0]
    assert isinstance(held, types.FunctionType)
    below = rebuilt(held, inner, new)
    cells[at] = types.CellType(below)
    copy = copied(outer, outer.__code__, tuple(cells))
    wrapped = copy.__dict__.get("__wrapped__")
    if isinstance(wrapped, types.FunctionType) and _reaches(wrapped, inner):
        copy.__dict__["__wrapped__"] = below if wrapped is held else rebuilt(wrapped, inner, new)
    return copy


def copied(
    like: types.FunctionType, code: types.CodeType, closure: tuple[types.CellType, ...] | None
) -> types.FunctionType:
    """A function with the globals, defaults, names, annotations and attributes of `like`, and this code and closure."""
    copy = types.FunctionType(code, like.__globals__, like.__name__, like.__defaults__, closure or None)
    copy.__kwdefaults__ = None if like.__kwdefaults__ is None else dict(like.__kwdefaults__)
    copy.__annotations__ = dict(like.__annotations__)
    copy.__qualname__, copy.__module__, copy.__doc__ = like.__qualname__, like.__module__, like.__doc__
    copy.__dict__.update(like.__dict__)
    if hasattr(like, "__type_params__"):
        copy.__type_params__ = like.__type_params__  # type: ignore[attr-defined]  # Python 3.12 and newer
    return copy


def _captured(fn: types.FunctionType) -> types.FunctionType | None:
    """The function that a wrapper without ``functools.wraps`` holds in a cell; None if `fn` is no such wrapper.

    A wrapper is a function made directly inside another function, out of a function that was passed to it.
    """
    if not fn.__code__.co_qualname.rpartition(".")[0].endswith("<locals>"):
        return None
    passed = _parameters_around(fn)
    held = {
        name: content
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
        if isinstance(content := _content(cell), types.FunctionType)
        and (name in passed if passed is not None else not _siblings(fn, content))
    }
    if len(held) > 1:
        raise Refused(
            f"{_named(fn)} captures several functions ({', '.join(sorted(held))}): it is open which of them it wraps; "
            "pass the inner function itself, or unwrap=False if this is not a decorator"
        )
    return next(iter(held.values()), None)


def _parameters_around(fn: types.FunctionType) -> set[str] | None:
    """Names of the parameters of the function that made `fn`; None if its source cannot be had."""
    try:
        definition = source_file(fn.__code__.co_filename, fn.__globals__).find(fn.__code__)
    except RewriteError:
        return None
    if definition is None or definition.enclosing is None:
        return None
    args = definition.enclosing.args
    return {argument.arg for argument in (*args.posonlyargs, *args.args, *args.kwonlyargs)}


def _siblings(one: types.FunctionType, other: types.FunctionType) -> bool:
    mine, others = one.__code__, other.__code__
    return mine.co_filename == others.co_filename and (
        mine.co_qualname.rpartition(".")[0] == others.co_qualname.rpartition(".")[0]
    )


def _content(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not bound yet
        return None


def _reaches(held: object, inner: types.FunctionType, seen: set[int] | None = None) -> bool:
    """True if `held` is `inner`, or a plain function that has it in a cell, at any depth."""
    if held is inner:
        return True
    seen = set() if seen is None else seen
    if not isinstance(held, types.FunctionType) or id(held) in seen:
        return False
    seen.add(id(held))
    return any(_reaches(_content(cell), inner, seen) for cell in held.__closure__ or ())


def _named(thing: object) -> str:
    if isinstance(thing, types.FunctionType):
        return f"{thing.__module__}.{thing.__code__.co_qualname}"
    name = getattr(thing, "__qualname__", None)
    kind = type(thing).__qualname__
    return f"{name} (a {kind})" if isinstance(name, str) and not inspect.isclass(thing) else f"a {kind}"
