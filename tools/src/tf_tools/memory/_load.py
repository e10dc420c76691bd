"""One load in a process of its own: resident memory above what the imports take, at its highest and at the end, and wall time.

In: a checkpoint folder and an implementation. Out: a `Load`. Linux alone: it reads and resets the kernel's high-water mark.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_BLOCKS = 8
_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # all in the process that is measured
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, slots=True)
class Load:
    """What one load took.

    Attributes:
        implementation: "transformers" or "vllm", as `--model-impl`.
        served_by: "module.Class" of the model.
        baseline: bytes resident after the imports.
        peak: bytes resident at most while the engine was built, above the baseline; mapped pages of files count.
        held: bytes resident when it was built, above the baseline.
        weights_seconds: wall time of building the model and loading its weights.
        seconds: wall time of building the engine.
    """

    implementation: str
    served_by: str
    baseline: int
    peak: int
    held: int
    weights_seconds: float
    seconds: float


class MemoryToolError(RuntimeError):
    """The process that was to be measured failed; the text ends with its last lines."""


def measure(folder: Path, implementation: str, *, timeout: float = 900.0) -> Load:
    """Load the checkpoint in `folder` in a fresh process.

    Raises:
        MemoryToolError: it failed, or there is no checkpoint.
    """
    if not (folder / "config.json").is_file():
        raise MemoryToolError(f"{folder} holds no config.json: expected the folder of a checkpoint")
    command = [sys.executable, "-m", "tf_tools.memory", "load", str(folder), "--implementation", implementation]
    ended = subprocess.run(
        command, env={**os.environ, **_ENVIRONMENT}, capture_output=True, text=True, timeout=timeout, check=False
    )
    lines = ended.stdout.splitlines()
    if ended.returncode != 0 or not lines:
        last = "\n".join((ended.stdout + ended.stderr).splitlines()[-30:])
        raise MemoryToolError(f"loading with {implementation} ended with status {ended.returncode}:\n{last}")
    return Load(**json.loads(lines[-1]))


def load_here(folder: Path, implementation: str) -> str:
    """Load in this process, which must be fresh; a `Load` as one line of JSON."""
    import torch
    import transformers  # noqa: F401
    import vllm.entrypoints.llm
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    torch.set_num_threads(1)
    spent = 0.0
    load_model = BaseModelLoader.load_model

    def timed(self: BaseModelLoader, *args: Any, **kwargs: Any) -> Any:
        nonlocal spent
        started = time.perf_counter()
        model = load_model(self, *args, **kwargs)
        spent += time.perf_counter() - started
        return model

    BaseModelLoader.load_model = timed
    baseline = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the high-water mark
    started = time.perf_counter()
    llm = LLM(
        model=str(folder),
        model_impl=implementation,
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=128,
        max_num_seqs=2,
        num_gpu_blocks_override=_BLOCKS,
        disable_log_stats=True,
    )
    seconds = time.perf_counter() - started
    peak, held = _status("VmHWM") - baseline, _status("VmRSS") - baseline
    (served_by,) = llm.apply_model(_class_of)
    return json.dumps(asdict(Load(implementation, served_by, baseline, peak, held, spent, seconds)))


def _class_of(model: object) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _status(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise MemoryToolError(f"the kernel does not report {field}: this tool needs Linux")
