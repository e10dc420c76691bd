"""Start one measured process and always get a row: a measurement, or why there is none.

The environment is made from the caller's without anything that steers vLLM, torch or threads, so that a variable left
over in a shell is not a difference between two days.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from tf_tools.bench._arms import parse_arm
from tf_tools.bench._rows import Finished, Row, finished_from_json
from tf_tools.bench._schedule import PRIME, Start
from tf_tools.bench._settings import Settings

_STEERS = re.compile(
    r"(VLLM|TORCH|TORCHINDUCTOR|TORCHDYNAMO|INDUCTOR|TRITON|PYTORCH|OMP|MKL|KMP|OPENBLAS|AST_REWRITE|TF_BACKEND)_.*"
)
_LAST_LINES = 15


def environment_for(settings: Settings, arm: str, caches: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """Of one process: what it inherits and may, then ours, then the arm's, then the settings'."""
    threads = str(settings.threads)
    folder = str(caches / arm)
    return {
        **{name: value for name, value in inherited.items() if not _STEERS.fullmatch(name)},
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # one process: its CPU time is the engine's
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # the class of the model is asked for by a function
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "OPENBLAS_NUM_THREADS": threads,
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiling in this process: no idle workers beside it
        # Each arm fills caches of its own: none finds what another compiled, and a second start is warm.
        "XDG_CACHE_HOME": folder,
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "VLLM_PLUGINS": parse_arm(arm).kind.plugins,
        **settings.environment,
    }


def launch(settings: Settings, start: Start, attempt: int, caches: Path, timeout: float) -> Row:
    """Run one start to its end, or to `timeout` seconds; whatever it left running is ended too."""
    load_average = os.getloadavg()[0]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="bench-") as name:
        folder = Path(name)
        (folder / "request.json").write_text(json.dumps(_request(settings, start)))
        failure = _run(folder, environment_for(settings, start.arm, caches, os.environ), timeout)
        result = None if failure else _result(folder)
    if result is None and not failure:
        failure = "the process ended well and left no result"
    return Row(
        mode=start.mode,
        pair=start.pair,
        attempt=attempt,
        arm=start.arm,
        position=start.position,
        cores=start.cores,
        load_average=load_average,
        seconds=time.perf_counter() - began,
        failure=failure,
        result=result,
    )


def _request(settings: Settings, start: Start) -> dict[str, object]:
    return {
        "model": str(settings.model.resolve()),
        "arm": start.arm,
        "model_impl": parse_arm(start.arm).kind.model_impl,
        "mode": start.mode,
        "dtype": settings.dtype,
        "concurrency": list(settings.concurrency),
        "input_tokens": settings.input_tokens,
        "output_tokens": settings.output_tokens,
        "repeats": 0 if start.pair == PRIME else settings.repeats,
        "cores": list(start.cores),
        "engine": dict(settings.engine),
    }


def _run(folder: Path, environment: Mapping[str, str], timeout: float) -> str:
    """Why the process failed; "" when it did not."""
    # -P: the folder that a measurement is started from may hold a `vllm`.
    command = [
        sys.executable,
        "-P",
        "-m",
        "tf_tools.bench._worker",
        str(folder / "request.json"),
        str(folder / "result"),
    ]
    with (folder / "output").open("wb") as output:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status = child.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"not done after {timeout:g} s\n{_last_lines(folder)}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if status == 0:
        return ""
    return f"{_told(folder) or _ended(status)}\n{_last_lines(folder)}"


def _told(folder: Path) -> str:
    try:
        return str(json.loads((folder / "result").read_text())["failure"])
    except (OSError, ValueError, KeyError):
        return ""


def _ended(status: int) -> str:
    if status >= 0:
        return f"the process ended with exit status {status}"
    return f"the process was ended by signal {signal.Signals(-status).name}"


def _last_lines(folder: Path) -> str:
    text = (folder / "output").read_text(errors="replace")
    return "\n".join(text.splitlines()[-_LAST_LINES:])


def _result(folder: Path) -> Finished | None:
    try:
        return finished_from_json(json.loads((folder / "result").read_text())["result"])
    except (OSError, ValueError, KeyError, TypeError):
        return None
