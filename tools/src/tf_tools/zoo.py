"""The oracle behind ``tf-backend zoo --level serve``: one tiny model in the engine, held against transformers.

In: a model on meta. Out: whether the engine's log-probabilities are the reference's. It knows a model
and a folder, and nothing of who asks.
"""

from __future__ import annotations

import copy
from pathlib import Path

import torch
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from tf_tools.checkpoints import scale_weights
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, serve, warm
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

__all__ = ["judge", "prepare"]


def prepare() -> None:
    """Import vLLM into this process."""
    warm()


def judge(skeleton: PreTrainedModel, folder: Path) -> tuple[str, str, int, float]:
    """Serve a model like `skeleton` with scaled random weights: chunked prefill, twice, then from the prefix cache.

    Returns:
        "equal", "wrong" or "failed"; the first run that is not equal, or how the engine failed; positions; worst difference.
    """
    write_checkpoint(skeleton, folder)
    prompts = probe_prompts(skeleton.get_input_embeddings().weight.shape[0])
    kwargs = {"max_num_batched_tokens": 32}
    answer = serve(ServeRequest(folder, prompts=prompts, llm_kwargs=kwargs, timeout=240.0))
    if answer.failure is not None:
        return "failed", f"the engine {answer.failure.kind}: {_one_line(answer.failure.message)}", 0, 0.0
    if not answer.served_by[0].startswith("tf_backend."):
        return "failed", f"it was served by {answer.served_by[0]}", 0, 0.0
    positions, worst = 0, 0.0
    for number, run in enumerate(answer.runs):
        report = compare_run(reference_for(folder, run), run)
        positions += sum(len(d) for d in report.differences)
        worst = max(worst, report.worst)
        if not report.ok:
            return "wrong", f"run {number + 1}: {' '.join(str(report).split())}"[:400], positions, worst
    return "equal", "", positions, worst


def write_checkpoint(skeleton: PreTrainedModel, folder: Path) -> None:
    """A checkpoint of the class and config of `skeleton`; the same bytes each time."""
    config = copy.deepcopy(skeleton.config)
    disable_progress_bar()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = type(skeleton)._from_config(config, dtype=torch.float32, attn_implementation="eager")
    scale_weights(model, seed=0)
    model.eval().save_pretrained(folder)


def _one_line(text: str) -> str:
    return " ".join(text.split())[:300]
