"""The engine under test, in a forked child: tokens and whole distributions out, or a row that says what went wrong.

    warm()                                                       # once: import vLLM, about ten seconds
    answer = serve(ServeRequest(folder, prompts=((5, 6, 7),)))   # seconds for a tiny model
    report = compare_run(reference_for(folder, answer.runs[0]), answer.runs[0])

vLLM is imported inside functions only: everything else in this package works without it.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tf_tools.fork import Failure, Outcome, run_in_fork
from tf_tools.sequences import Sequence

__all__ = [
    "ENVIRONMENT",
    "TENSOR_PARALLEL_2",
    "EngineError",
    "MissingVocabulary",
    "ServeRequest",
    "ServeResult",
    "dense_logprobs",
    "serve",
    "warm",
]

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine core in the child itself: no second import of vLLM
    "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # probes are functions
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""Set in the child before the engine is built. `ServeRequest.environment` is laid over it."""

TENSOR_PARALLEL_2: Mapping[str, str] = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
"""For `ServeRequest.environment` beside `tensor_parallel_size=2`: one core for each rank."""


class EngineError(RuntimeError):
    """The engine cannot be run as asked."""


class MissingVocabulary(EngineError):
    """The engine returned fewer log-probabilities at a position than the vocabulary has entries."""


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One engine: what it loads, how it is built, what it is asked.

    Attributes:
        model: checkpoint folder.
        prompts: token ids of each prompt; all are submitted at once.
        max_tokens: generated per prompt, end-of-sequence tokens ignored.
        model_impl: "transformers" (what is under test) or "vllm" (vLLM's own implementation).
        enforce_eager: False compiles: 30 s more.
        runs: how often the same prompts are asked of the same engine, with the distributions of the prompt. vLLM reads
            no prefix cache for such requests.
        cached: ask once more, without the distributions of the prompt, so that whole blocks come from the prefix cache.
        llm_kwargs: laid over the arguments of `vllm.LLM`; `max_num_batched_tokens=32` forces chunked prefill,
            `tensor_parallel_size=2` needs the environment `TENSOR_PARALLEL_2` and a main module that is safe to import.
        environment: laid over `ENVIRONMENT`.
        plugins: names of vLLM plugins to load: None for all installed, () for none.
        setup: called in the child before the engine is built; not in tensor-parallel workers, which vLLM's CPU
            platform spawns afresh.
        before: called in the child with the `vllm.LLM` before it is asked anything.
        probe: called in each worker on the loaded model; what it returns must be picklable.
        timeout: seconds for everything.
    """

    model: Path
    prompts: tuple[tuple[int, ...], ...]
    max_tokens: int = 8
    model_impl: str = "transformers"
    enforce_eager: bool = True
    runs: int = 2
    cached: bool = True
    llm_kwargs: Mapping[str, object] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    plugins: tuple[str, ...] | None = None
    setup: Callable[[], object] | None = None
    before: Callable[[Any], object] | None = None
    probe: Callable[[torch.nn.Module], object] | None = None
    timeout: float = 300.0


@dataclass(frozen=True, slots=True)
class ServeResult:
    """What came of a request.

    Attributes:
        runs: for each run the answers in the order of the prompts; the cached run is the last. Empty when the engine
            failed.
        cached_tokens: for each prompt, how many tokens the cached run took from the prefix cache.
        served_by: "module.Class" of the loaded model in each worker: which implementation answered.
        probed: the probe's result from each worker.
        failure: None, or how the engine ended.
        exit_status: of the child; 0 when all went well.
        output: everything written to standard output and error, in that order.
        seconds: wall time.
    """

    runs: tuple[tuple[Sequence, ...], ...]
    cached_tokens: tuple[int, ...]
    served_by: tuple[str, ...]
    probed: tuple[object, ...]
    failure: Failure | None
    exit_status: int
    output: str
    seconds: float

    @property
    def ok(self) -> bool:
        return self.failure is None

    def error_text(self) -> str:
        """All text in which a reason for a failure may stand: message, traceback, output. Empty when `ok`."""
        return "" if self.failure is None else "\n".join((self.failure.message, self.failure.traceback, self.output))

    def require(self) -> ServeResult:
        """This result.

        Raises:
            EngineError: the engine failed; the text ends with the child's traceback or last lines.
        """
        if self.failure is None:
            return self
        details = self.failure.traceback or "\n".join(self.output.splitlines()[-30:])
        raise EngineError(f"the engine {self.failure.kind}: {self.failure.message}\n{details}")


def warm() -> None:
    """Import vLLM into this process so that each child finds it there. Call before any heavy use of torch.

    Torch is set to one thread: an OpenMP pool that exists before a fork hangs the child.
    """
    torch.set_num_threads(1)
    for name, value in ENVIRONMENT.items():
        if name.startswith("OMP_") or (name not in os.environ and name.startswith(("HF_", "TOKENIZERS_"))):
            os.environ[name] = value
    try:
        import vllm.entrypoints.llm
        import vllm.v1.engine.llm_engine
        import vllm.v1.worker.cpu_worker  # noqa: F401
    except ImportError as error:
        raise EngineError("vLLM is not installed; the development environment holds it: uv sync") from error


def serve(request: ServeRequest) -> ServeResult:
    """Build the engine in a forked child, ask it, and bring the answers back. Never raises for what the engine does."""
    warm()
    outcome = run_in_fork(_serve_here, request.timeout, request)
    return _result(outcome)


def dense_logprobs(position: Mapping[int, Any], vocabulary: int) -> Tensor:
    """[vocab] float32 from one position of vLLM's log-probabilities.

    Raises:
        MissingVocabulary: an entry is absent, or one lies outside of the vocabulary.
    """
    missing = [t for t in range(vocabulary) if t not in position]
    beyond = [t for t in position if not 0 <= t < vocabulary]
    if missing or beyond:
        raise MissingVocabulary(
            f"expected log-probabilities for token ids 0..{vocabulary - 1}; missing {len(missing)} "
            f"(first {missing[:5]}), beyond {len(beyond)} (first {beyond[:5]})"
        )
    return torch.tensor([position[t].logprob for t in range(vocabulary)], dtype=torch.float32)


@dataclass(frozen=True, slots=True)
class _Answers:
    """What the child sends home."""

    runs: tuple[tuple[Sequence, ...], ...]
    cached_tokens: tuple[int, ...]
    served_by: tuple[str, ...]
    probed: tuple[object, ...]


def _result(outcome: Outcome) -> ServeResult:
    output = outcome.stdout + outcome.stderr
    answers = outcome.result if isinstance(outcome.result, _Answers) else _Answers((), (), (), ())
    return ServeResult(
        answers.runs,
        answers.cached_tokens,
        answers.served_by,
        answers.probed,
        outcome.failure,
        outcome.exit_status,
        output,
        outcome.seconds,
    )


def _serve_here(request: ServeRequest) -> _Answers:
    os.environ.update({**ENVIRONMENT, **request.environment})
    if request.plugins is None:
        os.environ.pop("VLLM_PLUGINS", None)
    else:
        os.environ["VLLM_PLUGINS"] = ",".join(request.plugins)
    if request.setup is not None:
        request.setup()
    from vllm import LLM

    arguments: dict[str, Any] = {
        "model": str(request.model),
        "skip_tokenizer_init": True,
        "enforce_eager": request.enforce_eager,
        "dtype": "float32",
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_logprobs": -1,
        "block_size": 32,  # of tokens: the CPU's own 128 is longer than any prompt here, so nothing would be cached
        "model_impl": request.model_impl,
        "disable_log_stats": True,
        **request.llm_kwargs,
    }
    llm = LLM(**arguments)
    if request.before is not None:
        request.before(llm)
    runs = [_generate(llm, request, with_prompt=True)[0] for _ in range(request.runs)]
    hits: tuple[int, ...] = ()
    if request.cached:
        run, hits = _generate(llm, request, with_prompt=False)
        runs.append(run)
    probed = tuple(llm.apply_model(_Portable(request.probe))) if request.probe is not None else ()
    return _Answers(tuple(runs), hits, tuple(llm.apply_model(_class_of)), probed)


class _Portable:
    """A probe that may be a lambda or a local function: vLLM sends it to tensor-parallel workers by plain pickle."""

    def __init__(self, function: Callable[[torch.nn.Module], object]) -> None:
        self._function = function

    def __call__(self, model: torch.nn.Module) -> object:
        return self._function(model)

    def __reduce__(self) -> tuple[Callable[..., object], tuple[bytes]]:
        import cloudpickle  # type: ignore[import-untyped]  # a dependency of vLLM

        module = sys.modules.get(getattr(self._function, "__module__", "") or "")
        if module is not None and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)  # a test file, say: the worker cannot import it
        return cloudpickle.loads, (cloudpickle.dumps(self._function),)


def _is_importable(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def _class_of(model: torch.nn.Module) -> str:
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _generate(llm: Any, request: ServeRequest, *, with_prompt: bool) -> tuple[tuple[Sequence, ...], tuple[int, ...]]:
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=request.max_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        logprobs=-1,
        prompt_logprobs=-1 if with_prompt else None,
    )
    vocabulary = int(llm.llm_engine.model_config.get_vocab_size())
    inputs = [{"prompt_token_ids": list(p)} for p in request.prompts]
    outputs = llm.generate(inputs, parameters, use_tqdm=False)
    answers = []
    for prompt, output in zip(request.prompts, outputs, strict=True):
        completion = output.outputs[0]
        tokens = tuple(completion.token_ids)
        if len(tokens) != request.max_tokens:
            raise EngineError(f"prompt of {len(prompt)}: expected {request.max_tokens} tokens, found {len(tokens)}")
        positions = [*(output.prompt_logprobs[1:] if with_prompt else ()), *completion.logprobs]
        rows = torch.stack([dense_logprobs(p, vocabulary) for p in positions])
        answers.append(Sequence(tuple(prompt), tokens, rows, start=0 if with_prompt else len(prompt) - 1))
    return tuple(answers), tuple(int(o.num_cached_tokens or 0) for o in outputs)
