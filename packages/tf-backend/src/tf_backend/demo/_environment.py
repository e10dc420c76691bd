"""What the engine wants from its process before it is imported: one process, small memory, few words.

In: the installed engine's name and the user's wishes. Out: changes to `os.environ` (what the user set stays) and, for the demo, to
the levels of loggers.
"""

from __future__ import annotations

import logging
import os
import warnings

_ALWAYS = {
    # One process: an error reaches the caller as it was raised, and two imports of vLLM are saved.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    # Standard output belongs to the completions.
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "TOKENIZERS_PARALLELISM": "false",
}
_CPU = {
    # In GiB. The default is a share of all memory.
    "VLLM_CPU_KVCACHE_SPACE": "1",
}
_SPARE_CORES = 1
"""Threads that wait for each other spin: with as many as cores, any other work makes each step ten times as slow."""
_QUIET = {
    # A CPU start alone logs some fifteen warnings that ask nothing of the reader.
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "TRANSFORMERS_VERBOSITY": "error",
}


def prepare_environment(distribution: str, *, verbose: bool = False) -> None:
    """Set what is unset. Call before anything imports vLLM; `distribution` is ``vllm`` or ``vllm-cpu``."""
    wanted = dict(_ALWAYS)
    if distribution == "vllm-cpu":
        wanted |= _CPU
    if not verbose:
        wanted |= _QUIET
    _set_unset(wanted)
    prepare_threads(distribution)
    if not verbose:
        # What is logged before vLLM has configured its logger, and by others on its behalf.
        for logger in ("vllm", "torch.utils.cpp_extension"):
            logging.getLogger(logger).setLevel(logging.ERROR)
        warnings.simplefilter("ignore")


def prepare_threads(distribution: str, *, ranks: int = 1) -> None:
    """Set what is unset of the threads of a CPU engine; processes that are started later inherit it."""
    if distribution != "vllm-cpu" or "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
        return
    # vLLM refuses 0 ranks in words of its own, later.
    threads = max(1, (len(os.sched_getaffinity(0)) - _SPARE_CORES) // max(1, ranks))
    wanted = {
        # Binding threads to cores needs the NUMA library and the whole machine.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": str(threads),
        # A worker process of its own exists only to be bound. Without it, a server saves an import of vLLM and its memory.
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    _set_unset(wanted)


def _set_unset(wanted: dict[str, str]) -> None:
    for name, value in wanted.items():
        os.environ.setdefault(name, value)
