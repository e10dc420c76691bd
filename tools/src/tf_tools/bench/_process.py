"""Start measured processes, let them run in turns, and always get a row of each: a measurement, or why there is none.

The environment is made from the caller's without anything that steers vLLM, torch or threads, so that a variable left
over in a shell is not a difference between two days.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tf_tools.bench._arms import parse_arm
from tf_tools.bench._rows import Finished, Row, finished_from_json
from tf_tools.bench._schedule import PRIME, Start, order
from tf_tools.bench._settings import Settings

_STEERS = re.compile(
    r"(VLLM|TORCH|TORCHINDUCTOR|TORCHDYNAMO|INDUCTOR|TRITON|PYTORCH|OMP|MKL|KMP|OPENBLAS|AST_REWRITE|TF_BACKEND)_.*"
)
_LAST_LINES = 15
_LOOK = 0.2
"""Seconds between two looks at whether a process is still there."""


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
        # Weights in huge pages: how many of them are is otherwise the largest difference between two equal processes.
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",  # compiling in this process: no idle workers beside it
        # Each arm fills caches of its own: none finds what another compiled, and a second start is warm.
        "XDG_CACHE_HOME": folder,
        "VLLM_CACHE_ROOT": f"{folder}/vllm",
        "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
        "TRITON_CACHE_DIR": f"{folder}/triton",
        "VLLM_PLUGINS": parse_arm(arm).kind.plugins,
        **settings.environment,
    }


def launch(settings: Settings, starts: Sequence[Start], attempt: int, caches: Path, timeout: float) -> tuple[Row, ...]:
    """Start processes one after the other, then let them measure in turns; a row for each, in their order.

    Each is loaded before the next begins, and all others wait while one runs. A process is given `timeout` seconds, waiting for its turn
    not counted; whatever it left running is ended too.
    """
    with contextlib.ExitStack() as stack:
        children = [stack.enter_context(Child(settings, start, caches, timeout)) for start in starts]
        for child in children:
            child.begin()
        rounds = 0
        while waiting := [child for child in children if child.asks]:
            for child in order(waiting, rounds):
                child.take_turn()
            rounds += 1
        return tuple(child.row(attempt) for child in children)


class Child:
    """One measured process: asks for each measured run, and stands still until it is its turn."""

    def __init__(self, settings: Settings, start: Start, caches: Path, timeout: float) -> None:
        self.asks = False
        self._settings = settings
        self._start = start
        self._caches = caches
        self._left = timeout
        self._timeout = timeout
        self._load_average = 0.0
        self._failure = ""
        self._result: Finished | None = None
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Child:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def begin(self) -> None:
        """Start the process and wait until it asks for its first turn, or has ended."""
        self._load_average = os.getloadavg()[0]
        (self._folder / "request.json").write_text(json.dumps(_request(self._settings, self._start)))
        self._asked, asks = os.pipe()
        granted, self._grants = os.pipe()
        for end in (self._asked, self._grants):
            self._stack.callback(os.close, end)
        # -P: the folder that a measurement is started from may hold a `vllm`.
        command = [sys.executable, "-P", "-m", "tf_tools.bench._worker"]
        command += [str(self._folder / "request.json"), str(self._folder / "result"), str(asks), str(granted)]
        with (self._folder / "output").open("wb") as output:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment_for(self._settings, self._start.arm, self._caches, os.environ),
                start_new_session=True,
                pass_fds=(asks, granted),
            )
        self._stack.callback(self._kill)
        for end in (asks, granted):
            os.close(end)
        self._run()

    def take_turn(self) -> None:
        """Let it do one measured run; until it asks again, or has ended."""
        os.write(self._grants, b"g")
        self._run()

    def row(self, attempt: int) -> Row:
        """What came of it."""
        if self._result is None and not self._failure:
            self._failure = "the process ended well and left no result"
        return Row(
            mode=self._start.mode,
            pair=self._start.pair,
            attempt=attempt,
            arm=self._start.arm,
            position=self._start.position,
            cores=self._start.cores,
            load_average=self._load_average,
            seconds=self._timeout - self._left,
            failure=self._failure,
            result=self._result,
        )

    def _run(self) -> None:
        began = time.perf_counter()
        self.asks = self._asks_within(self._left)
        self._left -= time.perf_counter() - began
        if self.asks:
            return
        status = self._process.poll()
        self._kill()
        if status is None:
            self._failure = f"not done after {self._timeout:g} s\n{_last_lines(self._folder)}"
        elif status != 0:
            self._failure = f"{_told(self._folder) or _ended(status)}\n{_last_lines(self._folder)}"
        else:
            self._result = _result(self._folder)

    def _asks_within(self, seconds: float) -> bool:
        """False where it has ended, or not asked in time; a process that it left behind may keep the pipe open."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if select.select([self._asked], [], [], min(_LOOK, max(seconds, 0.0)))[0]:
                if os.read(self._asked, 1):
                    return True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(max(until - time.perf_counter(), 0.0))
                return False
            if self._process.poll() is not None:
                return False
        return False

    def _kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


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
