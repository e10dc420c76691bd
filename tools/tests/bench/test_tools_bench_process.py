"""A measured process ends in a row, however it ends; and gets an environment that nothing leaks into."""

from __future__ import annotations

import json
import os
import stat
import sys
import textwrap
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from tf_tools.bench import Row, Settings, Start, launch
from tf_tools.bench._process import environment_for

START = Start("eager", 0, "native", 1, (0,))
FINISHED = """
    result = {"served_by": "a.B", "import_wall": 1.0, "import_cpu": 1.0, "load_wall": 1.0, "load_cpu": 1.0,
              "loaded_rss": 5, "peak_rss": 6, "measures": [{"concurrency": 1, "input_tokens": 64, "output_tokens": 32,
              "decode_tokens": 31, "prefill_wall": [1.0], "prefill_cpu": [1.0], "decode_wall": [2.0],
              "decode_cpu": [2.0]}]}
    open(RESULT, "w").write(json.dumps({"result": result}))
"""

TURN = """
    def turn():
        os.write(ASKS, b"a")
        os.read(GRANTED, 1)
"""

Launched = Callable[..., Row]
LaunchedAll = Callable[..., tuple[Row, ...]]


@pytest.fixture
def launched_all(settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> LaunchedAll:
    """Launch with a program in the place of Python: it finds files and pipes, and does as the test says."""

    def run(
        body: str, timeout: float = 20.0, changed: Settings | None = None, starts: Sequence[Start] = (START,)
    ) -> tuple[Row, ...]:
        program = tmp_path / "program"
        head = f"#!{sys.executable} -I\nimport json, os, signal, sys, time\nREQUEST, RESULT = sys.argv[-4:-2]\n"
        head += "ASKS, GRANTED = map(int, sys.argv[-2:])\n"
        program.write_text(head + textwrap.dedent(body))
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        with monkeypatch.context() as patch:
            patch.setattr("tf_tools.bench._process.sys.executable", str(program))
            return launch(changed or settings, starts, 3, tmp_path / "caches", timeout)

    return run


@pytest.fixture
def launched(launched_all: LaunchedAll) -> Launched:
    """The same for one process."""
    return lambda *args, **kwargs: launched_all(*args, **kwargs)[0]


def test_a_measurement_comes_home(launched: Launched) -> None:
    row = launched(FINISHED)
    assert row.failure == ""
    assert row.result is not None
    assert row.result.served_by == "a.B"
    assert row.result.measures[0].decode_cpu == (2.0,)
    assert (row.mode, row.pair, row.attempt, row.arm, row.position, row.cores) == ("eager", 0, 3, "native", 1, (0,))
    assert row.seconds > 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("print('last words'); sys.exit(3)", ("exit status 3", "last words")),
        ("os.kill(os.getpid(), signal.SIGSEGV)", ("SIGSEGV",)),
        (
            "open(RESULT, 'w').write(json.dumps({'failure': 'LayerRefused: why'})); print('trace'); sys.exit(1)",
            ("LayerRefused: why", "trace"),
        ),
        ("pass", ("left no result",)),
        ("open(RESULT, 'w').write('{\"resu')", ("left no result",)),
        ("open(RESULT, 'w').write(json.dumps({'result': {'served_by': 1}}))", ("left no result",)),
    ],
)
def test_a_process_without_a_measurement_is_a_failed_row(launched: Launched, body: str, words: tuple[str, ...]) -> None:
    row = launched(body)
    assert row.result is None
    assert not row.ok
    for word in words:
        assert word in row.failure


def test_a_hanging_process_is_ended_with_what_it_started(launched: Launched, tmp_path: Path) -> None:
    note = tmp_path / "child"
    body = f"""
    child = os.fork()
    if child:
        open({str(note)!r}, "w").write(str(child))
    time.sleep(600)
    """
    row = launched(body, timeout=2.0)
    assert "not done after 2 s" in row.failure
    assert _is_gone(int(note.read_text()))


def test_processes_are_loaded_one_by_one_and_measure_in_turns(launched_all: LaunchedAll, tmp_path: Path) -> None:
    log = tmp_path / "log"
    body = f"""
    def say(what):
        with open({str(log)!r}, "a") as file:
            file.write(json.load(open(REQUEST))["arm"] + " " + what + "\\n")
    {TURN}
    say("loads")
    time.sleep(0.3)
    for _ in range(3):
        turn()
        say("begins")
        time.sleep(0.1)
        say("ends")
    {FINISHED}
    """
    starts = [replace(START, arm=arm) for arm in ("native", "in-tree")]
    rows = launched_all(body, starts=starts)
    assert [row.arm for row in rows if row.ok] == ["native", "in-tree"]
    loads, turns = log.read_text().splitlines()[:2], log.read_text().splitlines()[2:]
    assert loads == ["native loads", "in-tree loads"]
    assert turns[1::2] == [line.replace("begins", "ends") for line in turns[::2]], "one ran while another did"
    assert [line.split()[0] for line in turns[::2]] == ["native", "in-tree", "in-tree", "native", "native", "in-tree"]
    assert rows[1].seconds < 2.0, "waiting for the others is no part of it"


def test_a_process_that_dies_in_its_turn_leaves_the_others_theirs(launched_all: LaunchedAll) -> None:
    body = f"""
    {TURN}
    turn()
    if json.load(open(REQUEST))["arm"] == "native":
        sys.exit(4)
    turn()
    {FINISHED}
    """
    dead, alive = launched_all(body, starts=[replace(START, arm=arm) for arm in ("native", "in-tree")])
    assert "exit status 4" in dead.failure
    assert alive.ok


def _is_gone(pid: int) -> bool:
    for _ in range(100):
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.05)
    return False


def test_the_request_says_what_to_measure(launched: Launched, settings: Settings, tmp_path: Path) -> None:
    note = tmp_path / "request"
    changed = replace(settings, engine={"block_size": 32}, repeats=7)
    launched(f"open({str(note)!r}, 'w').write(open(REQUEST).read())", changed=changed)
    request = json.loads(note.read_text())
    assert request["engine"] == {"block_size": 32}
    assert (request["repeats"], request["mode"], request["model_impl"], request["cores"]) == (7, "eager", "vllm", [0])
    assert os.path.isabs(request["model"])


def test_a_first_start_measures_nothing(settings: Settings, tmp_path: Path) -> None:
    from tf_tools.bench._process import _request

    assert _request(settings, replace(START, pair=-1))["repeats"] == 0


@pytest.mark.parametrize(("arm", "plugins"), [("ours", "tf_backend"), ("ours2", "tf_backend"), ("in-tree", "")])
def test_the_environment_is_made_anew(settings: Settings, tmp_path: Path, arm: str, plugins: str) -> None:
    inherited = {
        "PATH": "/bin",
        "VLLM_PLUGINS": "other",
        "VLLM_USE_SOMETHING": "1",
        "OMP_NUM_THREADS": "64",
        "TORCH_LOGS": "all",
        "TORCHINDUCTOR_FREEZING": "1",
        "PYTHONPATH": "kept",
    }
    found = environment_for(settings, arm, tmp_path, inherited)
    assert found["PATH"] == "/bin"
    assert found["PYTHONPATH"] == "kept"
    assert found["VLLM_PLUGINS"] == plugins
    assert found["OMP_NUM_THREADS"] == "1"
    assert found["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"
    assert not {"VLLM_USE_SOMETHING", "TORCH_LOGS", "TORCHINDUCTOR_FREEZING"} & set(found)
    assert found["VLLM_CACHE_ROOT"].startswith(str(tmp_path / arm))


def test_each_arm_has_caches_of_its_own(settings: Settings, tmp_path: Path) -> None:
    names = ("XDG_CACHE_HOME", "VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")
    one, other = (environment_for(settings, arm, tmp_path, {}) for arm in ("ours", "ours2"))
    assert all(one[name] != other[name] for name in names)


def test_a_variable_for_all_arms_is_laid_over(settings: Settings, tmp_path: Path) -> None:
    changed = replace(settings, threads=2, environment={"VLLM_CPU_KVCACHE_SPACE": "4", "OTHER": "x"})
    found = environment_for(changed, "native", tmp_path, {})
    assert (found["VLLM_CPU_KVCACHE_SPACE"], found["OTHER"], found["OMP_NUM_THREADS"]) == ("4", "x", "2")
