"""Recorded surfaces: JSON under ``data/``, so that a build that is not installed can be checked against everywhere.

In and out: a `Surface`. Signatures are stored as Python writes them, so that a diff of two records reads as a diff of vLLM.
"""

from __future__ import annotations

import json
from importlib import resources
from pathlib import Path
from typing import Any

from tf_tools.contract._data import Definition, Entry, Surface
from tf_tools.contract._errors import ContractError
from tf_tools.contract._signature import from_text, to_text


def recorded() -> tuple[Surface, ...]:
    """The surfaces that come with this package."""
    folder = resources.files("tf_tools.contract").joinpath("data")
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".json")), key=lambda entry: entry.name)
    return tuple(loads(file.read_text(), file.name) for file in files)


def data_folder() -> Path:
    """Where records are written: this package's own ``data`` folder in the repository."""
    return Path(__file__).parent / "data"


def file_name(surface: Surface) -> str:
    """``vllm-0.33.0.json``, by distribution and version."""
    return f"{surface.source.replace(' ', '-')}.json"


def dumps(surface: Surface) -> str:
    """`surface` as JSON, sorted by path."""
    entries = {path: _entry_to_json(entry) for path, entry in sorted(surface.entries.items())}
    return json.dumps({"source": surface.source, "sha256": surface.sha256, "entries": entries}, indent=1) + "\n"


def loads(text: str, name: str) -> Surface:
    """The surface in `text`; ContractError, with `name`, when it is none."""
    try:
        data = json.loads(text)
        entries = {path: _entry_from_json(entry) for path, entry in data["entries"].items()}
        return Surface(data["source"], data["sha256"], entries)
    except (ValueError, KeyError, TypeError, AttributeError, SyntaxError) as error:
        raise ContractError(f"{name} does not hold a surface of vLLM ({error!r}); record it again") from error


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    if entry.missing:
        return {"missing": entry.missing}
    return {"definitions": [_definition_to_json(one) for one in entry.definitions]}


def _definition_to_json(one: Definition) -> dict[str, Any]:
    data: dict[str, Any] = {"kind": one.kind, "where": one.where}
    if one.annotation:
        data["annotation"] = one.annotation
    if one.signature is not None:
        data |= {"signature": to_text(one.signature), "body": one.body}
    if one.value is not None:
        data["value"] = one.value
    if one.bases:
        data["bases"] = list(one.bases)
    if one.members is not None:
        data["members"] = {name: to_text(member) for name, member in one.members.items()}
    return data


def _entry_from_json(data: dict[str, Any]) -> Entry:
    return Entry(tuple(_definition_from_json(one) for one in data.get("definitions", [])), data.get("missing", ""))


def _definition_from_json(data: dict[str, Any]) -> Definition:
    members = data.get("members")
    return Definition(
        kind=data["kind"],
        where=data["where"],
        annotation=data.get("annotation", ""),
        signature=from_text(data["signature"]) if "signature" in data else None,
        body=data.get("body", ""),
        value=data.get("value"),
        bases=tuple(data.get("bases", ())),
        members=None if members is None else {name: from_text(text) for name, text in members.items()},
    )
