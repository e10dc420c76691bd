from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from typing import NoReturn

import pytest
import torch
from tf_tools.fork import ChildFailed, run_in_fork


class _Unreadable(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__("needs two arguments")


def test_a_value_comes_back() -> None:
    state = {"x": 1}

    def change(amount: int, *, twice: bool) -> tuple[int, torch.Tensor]:
        state["x"] += amount
        return os.getpid(), torch.full((2,), float(state["x"] * (2 if twice else 1)))

    outcome = run_in_fork(change, 20, 4, twice=True)
    pid, tensor = outcome.value()  # type: ignore[misc]
    assert pid != os.getpid()
    assert tensor.tolist() == [10.0, 10.0]
    assert state == {"x": 1}
    assert outcome.exit_status == 0


def test_more_than_a_pipe_holds() -> None:
    outcome = run_in_fork(lambda: b"x" * 30_000_000, 20)
    assert outcome.value() == b"x" * 30_000_000


def test_an_exception_comes_back_with_its_traceback() -> None:
    def broken_layer() -> NoReturn:
        raise _Unreadable(1, 2)

    outcome = run_in_fork(broken_layer, 20)
    assert outcome.failure is not None
    assert outcome.failure.kind == "raised"
    assert outcome.failure.exception.endswith("_Unreadable")
    assert "in broken_layer" in outcome.failure.traceback
    with pytest.raises(ChildFailed, match=r"(?s)needs two arguments.*in broken_layer"):
        outcome.value()


def test_system_exit_is_an_exception_here() -> None:
    failure = run_in_fork(lambda: sys.exit(0), 20).failure
    assert failure is not None
    assert failure.exception == "builtins.SystemExit"


@pytest.mark.parametrize("status", [0, 3])
def test_leaving_without_a_result_is_reported_whatever_the_status(status: int) -> None:
    def leave() -> None:
        print("last words", file=sys.stderr, flush=True)
        os._exit(status)

    outcome = run_in_fork(leave, 20)
    assert outcome.failure is not None
    assert outcome.failure.kind == "died"
    assert f"exit status {status}" in outcome.failure.message
    with pytest.raises(ChildFailed, match="last words"):
        outcome.value()


def test_a_crash_names_the_signal() -> None:
    outcome = run_in_fork(lambda: os.kill(os.getpid(), signal.SIGSEGV), 20)
    assert outcome.failure is not None
    assert "SIGSEGV" in outcome.failure.message
    assert outcome.exit_status == -signal.SIGSEGV


def test_a_hang_ends_at_the_timeout() -> None:
    started = time.monotonic()
    outcome = run_in_fork(lambda: time.sleep(60), 0.5)
    assert outcome.failure is not None
    assert outcome.failure.kind == "timeout"
    assert time.monotonic() - started < 10


def test_a_worker_left_behind_neither_delays_nor_survives() -> None:
    def leave_a_worker() -> int:
        return subprocess.Popen(["sleep", "60"], close_fds=False).pid

    started = time.monotonic()
    outcome = run_in_fork(leave_a_worker, 20)
    worker = outcome.value()
    assert isinstance(worker, int)
    assert time.monotonic() - started < 10
    _assert_gone(worker)


def test_a_worker_that_holds_the_pipe_does_not_hide_the_death_of_the_child() -> None:
    def crash_beside_a_worker() -> None:
        if os.fork() == 0:
            time.sleep(60)  # with the write end of the pipe open
        os._exit(5)

    started = time.monotonic()
    outcome = run_in_fork(crash_beside_a_worker, 30)
    assert outcome.failure is not None
    assert "exit status 5" in outcome.failure.message
    assert time.monotonic() - started < 10


def test_output_of_the_child_and_of_its_programs_is_kept() -> None:
    def speak() -> None:
        print("from Python")
        subprocess.run(["sh", "-c", "echo from sh; echo to stderr >&2"], check=True)

    outcome = run_in_fork(speak, 20)
    assert outcome.stdout.splitlines() == ["from Python", "from sh"]
    assert outcome.stderr == "to stderr\n"


def test_a_value_that_cannot_be_sent() -> None:
    failure = run_in_fork(lambda: lambda: None, 20).failure
    assert failure is not None
    assert failure.kind == "unpicklable"
    assert "function" in failure.message


def test_a_value_that_cannot_be_read_here() -> None:
    def make() -> object:
        module = type(sys)("only_in_the_child")
        exec("class Here: pass", module.__dict__)
        module.Here.__module__ = "only_in_the_child"  # type: ignore[attr-defined]
        sys.modules["only_in_the_child"] = module
        return module.Here()  # type: ignore[attr-defined]

    failure = run_in_fork(make, 20).failure
    assert failure is not None
    assert failure.kind == "unpicklable"
    assert "only_in_the_child" in failure.message


def test_no_file_descriptor_is_left_open() -> None:
    before = set(os.listdir("/proc/self/fd"))
    run_in_fork(lambda: None, 20)
    assert set(os.listdir("/proc/self/fd")) == before


def _assert_gone(pid: int) -> None:
    for _ in range(100):
        try:
            with open(f"/proc/{pid}/stat") as file:
                if file.read().rpartition(")")[2].split()[0] == "Z":
                    return
        except FileNotFoundError:
            return
        time.sleep(0.02)
    raise AssertionError(f"process {pid} is still there")
