"""Content-addressed files, and life without them."""

import inspect
import linecache
import multiprocessing
import os
import traceback
from pathlib import Path

import pytest
from ast_rewrite._store import default_folder, store


def test_the_default_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("AST_REWRITE_CACHE", "/somewhere/else")
    assert default_folder() == Path("/somewhere/else")
    monkeypatch.delenv("AST_REWRITE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/ast-rewrite")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("HOME", "/someone")
    assert default_folder() == Path("/someone/.cache/ast-rewrite")


def test_a_file_has_the_bytes_and_nothing_temporary_is_left(case, cache_folder):
    made = case("def f(x):\n    return 'ä'\n").patch.compile()
    assert Path(made.filename).read_bytes() == made.text.encode()
    assert os.listdir(cache_folder) == [Path(made.filename).name]
    assert Path(made.filename).name.startswith("f-")


def test_the_folder_can_be_given(case, tmp_path, cache_folder):
    made = case("def f(x):\n    return x\n").patch.compile(folder=tmp_path / "deep" / "er")
    assert Path(made.filename).parent == tmp_path / "deep" / "er"
    assert not cache_folder.exists()


def test_other_bytes_under_the_name_are_replaced_and_never_run(case):
    c = case("def f(x):\n    return x\n")
    made = c.patch.compile()
    Path(made.filename).write_text("def f(x):\n    return 'changed'\n")
    again = c.patch.compile()
    assert again.filename == made.filename
    assert again.function(1) == 1
    assert Path(made.filename).read_text() == made.text


def test_the_same_bytes_are_not_written_again(case):
    c = case("def f(x):\n    return x\n")
    made = c.patch.compile()
    os.utime(made.filename, (1, 1))
    c.patch.compile()
    assert os.stat(made.filename).st_mtime == 1


def test_without_a_folder_everything_but_the_file_is_there(case, tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("not a folder")
    monkeypatch.setenv("AST_REWRITE_CACHE", str(blocker / "cache"))
    c = case("def f(x):\n    return x / 0\n")
    made = c.patch.compile()
    assert not os.path.exists(made.filename)
    linecache.checkcache()
    assert inspect.getsource(made.function) == "def f(x):\n    return x / 0\n"
    with pytest.raises(ZeroDivisionError) as caught:
        made.function(1)
    assert traceback.extract_tb(caught.tb)[-1].line == "return x / 0"


def test_checkcache_keeps_the_text_even_if_the_file_goes(case):
    made = case("def f(x):\n    return x\n").patch.compile()
    os.unlink(made.filename)
    linecache.checkcache()
    linecache.checkcache(made.filename)
    assert inspect.getsource(made.inner) == "def f(x):\n    return x\n"


def test_names_are_made_fit_for_files(tmp_path):
    assert Path(store("x", name="a.<locals>.b/../é" * 20, sha256="0" * 64, folder=tmp_path)).parent == tmp_path
    assert len(os.listdir(tmp_path)) == 1


def _write_often(folder, text):
    for _ in range(50):
        store(text, name="f", sha256="1" * 64, folder=folder)
        for path in folder.glob("*.py"):
            assert path.read_text() == text


def test_processes_racing_for_one_file_never_show_a_torn_one(tmp_path):
    context = multiprocessing.get_context("fork")
    text = "x = 1\n" * 20_000
    racers = [context.Process(target=_write_often, args=(tmp_path, text)) for _ in range(3)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join(60)
    assert [racer.exitcode for racer in racers] == [0, 0, 0]
    assert len(os.listdir(tmp_path)) == 1
