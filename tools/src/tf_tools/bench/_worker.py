"""The measured process: `python -m tf_tools.bench._worker REQUEST RESULT ASKS GRANTED`, two JSON files and two pipes. Not for people.

Pinned to its cores before anything is imported; builds the engine inside this process; ends without cleaning up.
"""

from __future__ import annotations

import ctypes
import dataclasses
import json
import os
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tf_tools.bench._arms import parse_arm
from tf_tools.bench._errors import BenchError
from tf_tools.bench._rows import Finished
from tf_tools.bench._workload import measure, prompts_for

_PR_SET_PDEATHSIG = 1


def main(request_file: str, result_file: str, asks: str, granted: str) -> int:
    """Measure as asked; 0 when the result holds a measurement, 1 when it holds a failure.

    Args:
        asks, granted: file descriptors; a byte is written to the first before each measured run, and one awaited from the second.
    """

    def turn() -> None:
        os.write(int(asks), b"a")
        os.read(int(granted), 1)

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # never outlives a measurement that was killed
    request = json.loads(Path(request_file).read_text())
    os.sched_setaffinity(0, request["cores"])
    try:
        result: dict[str, Any] = {"result": dataclasses.asdict(_measured(request, turn))}
    except Exception as error:
        traceback.print_exc()
        result = {"failure": f"{type(error).__name__}: {error}"}
    partial = Path(f"{result_file}.partial")
    partial.write_text(json.dumps(result))
    partial.rename(result_file)
    return 1 if "failure" in result else 0


def _measured(request: Mapping[str, Any], turn: Callable[[], None]) -> Finished:
    from_start = time.perf_counter(), _cpu()
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    imported = time.perf_counter(), _cpu()
    concurrency: Sequence[int] = request["concurrency"]
    inputs, outputs = int(request["input_tokens"]), int(request["output_tokens"])
    arguments: dict[str, Any] = {
        "model": request["model"],
        "model_impl": request["model_impl"],
        "dtype": request["dtype"],
        "enforce_eager": request["mode"] == "eager",
        "skip_tokenizer_init": True,
        "max_model_len": inputs + outputs,
        "max_num_seqs": max(concurrency),
        "max_num_batched_tokens": max(2048, max(concurrency) * inputs, inputs + outputs),  # a prefill is one step
        "enable_prefix_caching": False,  # each repeat computes its prompts
        "async_scheduling": False,  # otherwise the first decode step lies before the first token
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        **request["engine"],
    }
    llm = LLM(**arguments)
    loaded = time.perf_counter(), _cpu()
    loaded_rss = _peak_rss()
    (served_by,) = set(llm.apply_model(_class_of))
    refusal = parse_arm(request["arm"]).kind.refusal(served_by)
    if refusal:
        raise BenchError(refusal)
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=outputs,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = _VllmEngine(llm.llm_engine, sampling)
    vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
    measures = tuple(
        measure(engine, prompts_for(n, inputs, vocabulary), outputs, int(request["repeats"]), turn) for n in concurrency
    )
    return Finished(
        served_by=served_by,
        import_wall=imported[0] - from_start[0],
        import_cpu=imported[1] - from_start[1],
        load_wall=loaded[0] - imported[0],
        load_cpu=loaded[1] - imported[1],
        loaded_rss=loaded_rss,
        peak_rss=_peak_rss(),
        measures=measures,
    )


class _VllmEngine:
    """vLLM's engine as a `tf_tools.bench._workload.Engine`."""

    def __init__(self, engine: Any, sampling: Any) -> None:
        self._engine = engine
        self._sampling = sampling
        self._batches = 0

    def submit(self, prompts: Sequence[Sequence[int]], output_tokens: int) -> Sequence[str]:
        if output_tokens != self._sampling.max_tokens:
            raise BenchError(f"built for {self._sampling.max_tokens} output tokens; asked for {output_tokens}")
        self._batches += 1
        names = [f"{self._batches}-{index}" for index in range(len(prompts))]
        rendered = self._engine.renderer.render_cmpl([{"prompt_token_ids": list(prompt)} for prompt in prompts])
        for name, prompt in zip(names, rendered, strict=True):
            self._engine.add_request(name, prompt, self._sampling.clone())
        return names

    def step(self) -> Mapping[str, int]:
        return {output.request_id: len(output.outputs[0].token_ids) for output in self._engine.step()}

    def is_idle(self) -> bool:
        return not self._engine.has_unfinished_requests()


def _class_of(model: object) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _cpu() -> float:
    """Seconds: all threads, and the child processes that have ended (vLLM inspects model classes in one)."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _peak_rss() -> int:
    """Bytes. `ru_maxrss` would begin at the size of the process that started this one; VmHWM is of this one alone."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # an engine may take seconds to let go, or hang there
