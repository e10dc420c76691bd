"""The reference: transformers with eager attention in float32, the whole sequence in one forward, no cache.

Eager attention because transformers' sdpa path drops soft caps; the experts' own loop for the same reason; no cache
because a cache is one of the things under test. Results are kept on disk under a hash of the checkpoint's files, the
tokens and the versions, so that a slow model is computed once.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tf_tools.sequences import Sequence

__all__ = [
    "Greedy",
    "ReferenceError",
    "checkpoint_digest",
    "greedy",
    "load_reference",
    "logprobs_of",
    "reference_for",
    "reference_logprobs",
    "serve_with_transformers",
]

# A change in how the reference is computed must change this, or the disk cache would hide it.
_METHOD = "eager-float32-full-forward-1"


class ReferenceError(RuntimeError):
    """The reference cannot be computed from this checkpoint: weights are missing, or token ids are out of range."""


@dataclass(frozen=True, slots=True)
class Greedy:
    """A greedy continuation and, for each token, how far ahead of the second it was (log-probability, >= 0)."""

    tokens: tuple[int, ...]
    margins: tuple[float, ...]


def load_reference(folder: Path, *, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The checkpoint's head model in transformers, eager attention and eager experts, evaluation mode.

    Raises:
        ReferenceError: a weight is missing, unexpected or of another shape: transformers would only warn; or the model type is unknown.
    """
    disable_progress_bar()
    loaded = _class_of(folder).from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        local_files_only=True,
        output_loading_info=True,
    )
    model, info = cast("tuple[PreTrainedModel, dict[str, Any]]", loaded)
    faults = {kind: names for kind, names in info.items() if names and kind != "error_msgs"}
    if faults:
        raise ReferenceError(f"{folder} does not hold the weights of {type(model).__name__}: {faults}")
    return model.eval()


def _class_of(folder: Path) -> Any:
    """The class that the checkpoint's config names; transformers' own choice where it names none."""
    config = folder / "config.json"
    held = json.loads(config.read_text()) if config.is_file() else {}
    names = held.get("architectures")
    if held.get("model_type", next(iter(CONFIG_MAPPING))) not in CONFIG_MAPPING:
        raise ReferenceError(f"{config} is of model type `{held['model_type']}`, which transformers does not know")
    return getattr(transformers, names[0], AutoModelForCausalLM) if names else AutoModelForCausalLM


@torch.no_grad()
def logprobs_of(model: PreTrainedModel, token_ids: SequenceOf[int]) -> Tensor:
    """[T, vocab] log-probabilities in float32 (float64 for a float64 model); row t predicts token t + 1."""
    vocabulary = model.get_input_embeddings().weight.shape[0]
    bad = [t for t in token_ids if not 0 <= t < vocabulary]
    if bad or not token_ids:
        raise ReferenceError(f"token ids must be one or more in [0, {vocabulary}), found {bad or 'none'}")
    with _true_float64() if model.dtype == torch.float64 else contextlib.nullcontext():
        logits = model(input_ids=torch.tensor([list(token_ids)]), use_cache=False).logits[0]
        return torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), dim=-1)


def reference_logprobs(
    folder: Path, token_ids: SequenceOf[SequenceOf[int]], *, cache: Path | None = None
) -> list[Tensor]:
    """One [T, vocab] float32 tensor for each token list; row t predicts token t + 1.

    Args:
        folder: a checkpoint folder.
        token_ids: any number of sequences, each computed alone: no padding, no batch effects.
        cache: where results are kept; by default `$TF_TOOLS_CACHE` or `~/.cache/tf_tools`.
    """
    root = cache or Path(os.environ.get("TF_TOOLS_CACHE", Path.home() / ".cache" / "tf_tools"))
    digest = checkpoint_digest(folder)
    results: list[Tensor] = []
    model: PreTrainedModel | None = None
    for tokens in token_ids:
        path = root / f"{_key(digest, tokens)}.safetensors"
        if path.exists():
            results.append(load_file(path)["logprobs"])
            continue
        model = model or load_reference(folder)
        results.append(logprobs_of(model, tokens))
        _store(path, results[-1])
    return results


def reference_for(folder: Path, sequences: SequenceOf[Sequence], *, cache: Path | None = None) -> list[Tensor]:
    """The reference for what a server answered: over each prompt followed by the server's own continuation."""
    return reference_logprobs(folder, [s.token_ids for s in sequences], cache=cache)


def greedy(folder: Path, prompt: SequenceOf[int], n: int) -> Greedy:
    """The n tokens that greedy decoding of the reference appends to the prompt, with their margins."""
    return _greedy(load_reference(folder), prompt, n)[0]


def serve_with_transformers(
    model: PreTrainedModel, prompts: SequenceOf[SequenceOf[int]], max_tokens: int
) -> list[Sequence]:
    """Answer prompts with a live transformers model, as a server would: broken models make known-wrong servers."""
    answers = []
    for prompt in prompts:
        result, rows = _greedy(model, prompt, max_tokens)
        answers.append(Sequence(tuple(prompt), result.tokens, rows))
    return answers


def checkpoint_digest(folder: Path) -> str:
    """sha256 over the names and bytes of the files that define a model: config, weights, index."""
    files = sorted(p for p in folder.iterdir() if p.suffix in {".json", ".safetensors"})
    stamps = tuple((p.name, p.stat().st_size, p.stat().st_mtime_ns) for p in files)
    return _digest_of(folder.resolve(), stamps)


@lru_cache(maxsize=256)
def _digest_of(folder: Path, stamps: tuple[tuple[str, int, int], ...]) -> str:
    total = hashlib.sha256()
    for name, _, _ in stamps:
        total.update(name.encode() + b"\0")
        with (folder / name).open("rb") as file:
            total.update(hashlib.file_digest(file, "sha256").digest())
    return total.hexdigest()


def _key(digest: str, tokens: SequenceOf[int]) -> str:
    parts = (_METHOD, transformers.__version__, torch.__version__, digest, ",".join(map(str, tokens)))
    return hashlib.sha256("|".join(parts).encode()).hexdigest()


def _store(path: Path, logprobs: Tensor) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({"logprobs": logprobs.contiguous()}, scratch)
    os.replace(scratch, path)


def _greedy(model: PreTrainedModel, prompt: SequenceOf[int], n: int) -> tuple[Greedy, Tensor]:
    ids, tokens, margins = list(prompt), [], []
    rows = logprobs_of(model, ids)
    for step in range(n):
        best = rows[-1].topk(2)
        tokens.append(int(best.indices[0]))
        margins.append(float(best.values[0] - best.values[1]))
        ids.append(tokens[-1])
        if step + 1 < n:
            rows = logprobs_of(model, ids)
    kept = len(ids) - 1
    return Greedy(tuple(tokens), tuple(margins)), rows[:kept]


class _Float64(TorchFunctionMode):
    """Turns every request for float32 into float64: norms, softmax and rotary cast to float32 by name."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.float:
            func = Tensor.double
        args = tuple(torch.float64 if a is torch.float32 else a for a in args)
        kwargs = {k: torch.float64 if v is torch.float32 else v for k, v in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextlib.contextmanager
def _true_float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with _Float64():
            yield
    finally:
        torch.set_default_dtype(before)
