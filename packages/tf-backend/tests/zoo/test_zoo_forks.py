"""A job that crashes or hangs is an outcome among others."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tf_backend.zoo.forks import run_forked


def _kill() -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return b""


def _leave() -> bytes:
    os._exit(3)


def _hang() -> bytes:
    time.sleep(60)
    return b""


def _fail() -> bytes:
    raise ValueError("two\nlines")


def test_each_end_is_told() -> None:
    jobs: list[tuple[str, Callable[[], bytes]]] = [
        ("good", lambda: b"x" * 300_000),
        ("raised", _fail),
        ("killed", _kill),
        ("left", _leave),
        ("hung", _hang),
    ]
    started = time.monotonic()
    found = {outcome.name: outcome for outcome in run_forked(jobs, at_once=3, timeout=6.0)}
    assert time.monotonic() - started < 40
    assert found["good"].value == b"x" * 300_000
    assert found["good"].failure == ""
    assert found["raised"].failure.startswith("ValueError: two lines (test_zoo_forks.py, line ")
    assert "SIGSEGV" in found["killed"].failure
    assert found["left"].failure == "the process ended without an answer, exit status 3"
    assert found["hung"].failure == "no answer within 6 s"


def test_what_a_hanging_job_started_ends_with_it(tmp_path: Path) -> None:
    file = tmp_path / "pid"

    def start() -> bytes:
        child = subprocess.Popen(["sleep", "60"])
        file.write_text(str(child.pid))
        return _hang()

    list(run_forked([("one", start)], at_once=1, timeout=1.5))
    pid = int(file.read_text())
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            break
        time.sleep(0.05)
    else:
        pytest.fail("the job's child still runs")


def test_output_goes_to_the_log(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    def talk() -> bytes:
        print("said")
        os.write(2, b"shouted\n")
        return b"1"

    log = tmp_path / "log"
    list(run_forked([("one", talk)], at_once=1, timeout=10, log=log))
    assert sorted(log.read_text().split()) == ["said", "shouted"]
    assert capfd.readouterr() == ("", "")


def test_children_end_when_the_caller_stops_listening() -> None:
    runs = run_forked([("quick", lambda: b"1"), ("slow", _hang)], at_once=2, timeout=60)
    assert next(runs).name == "quick"
    started = time.monotonic()
    runs.close()
    assert time.monotonic() - started < 5
