"""Edits as data, and done again in another process."""

import json
import pickle
import subprocess
import sys

import pytest
from ast_rewrite import Edit, Refused, SourceSpan, replay

TEXT = """
import functools

def deco(fn):
    @functools.wraps(fn)
    def wrapper(*args):
        return fn(*args)
    return wrapper

class C:
    a, b = staticmethod(lambda x: x + 1), staticmethod(lambda x: x * 2)
    ab = staticmethod(lambda x: (x + 1, x * 2))

    @deco
    def f(self, x):
        y = self.a(x)
        z = self.b(x)
        unused = abs(x)
        return (y, z)

f = C.f
"""


@pytest.fixture
def recorded(case):
    c = case(TEXT)
    c.patch.hoist([c.at("self.a(x)"), c.at("self.b(x)")], "self.ab({0})", ["a", "b"], [c.at("x")])
    c.patch.delete(c.at("abs(x)"))
    c.patch.replace(c.at("(y, z)"), "{{'y': {y}, 'z': {z}}}", y=c.at("y", 1), z=c.at("z", 1))
    return c, c.patch.compile()


def test_edits_go_through_json_and_pickle(recorded):
    _, made = recorded
    assert tuple(Edit.from_json(json.loads(json.dumps(edit.to_json()))) for edit in made.edits) == made.edits
    assert pickle.loads(pickle.dumps(made.edits)) == made.edits


def test_other_data_is_no_edit():
    data = Edit("delete", SourceSpan(1, 0, 1, 1)).to_json()
    with pytest.raises(ValueError, match="unknown kind"):
        Edit.from_json({**data, "kind": "run"})
    with pytest.raises(KeyError):
        Edit.from_json({"kind": "delete"})


def test_replayed_edits_give_the_same_function(recorded):
    c, made = recorded
    again = replay(c.fn, made.edits, source_sha256=made.source_sha256, sha256=made.sha256)
    assert (again.text, again.filename, again.edits) == (made.text, made.filename, made.edits)
    assert again.function(c.module.C, 3) == {"y": 4, "z": 6}
    assert again.function is not made.function


def test_another_process_derives_the_same_text(recorded, tmp_path):
    c, made = recorded
    program = f"""
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location({c.module.__name__!r}, {c.module.__file__!r})
module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
from ast_rewrite import Edit, replay
data = json.load(sys.stdin)
edits = [Edit.from_json(edit) for edit in data["edits"]]
made = replay(module.C.f, edits, source_sha256=data["source"], sha256=data["result"])
print(made.function(module.C, 5))
"""
    request = {"edits": [e.to_json() for e in made.edits], "source": made.source_sha256, "result": made.sha256}
    done = subprocess.run(
        [sys.executable, "-c", program], input=json.dumps(request), capture_output=True, text=True, check=False
    )
    assert done.stdout == "{'y': 6, 'z': 10}\n", done.stderr


def test_another_source_is_refused(recorded, case):
    c, made = recorded
    other = case(TEXT.replace("x = ", "x  = ").replace("z = self.b(x)", "z = self.b(x )"))
    with pytest.raises(Refused, match="the edits were made for"):
        replay(other.fn, made.edits, source_sha256=made.source_sha256, sha256=made.sha256)
    assert c.fn is not other.fn


def test_another_result_is_refused(recorded):
    c, made = recorded
    with pytest.raises(Refused, match="expected"):
        replay(c.fn, made.edits[:-1], source_sha256=made.source_sha256, sha256=made.sha256)
    with pytest.raises(Refused, match="expected"):
        replay(c.fn, made.edits, source_sha256=made.source_sha256, sha256="0" * 64)


def test_edits_that_do_not_fit_are_refused_when_replayed(recorded):
    c, made = recorded
    bad = Edit("replace", SourceSpan(c.source.lineno + 1, 8, c.source.lineno + 1, 10), "1")
    with pytest.raises(Refused, match="exactly this range"):
        replay(c.fn, [bad], source_sha256=made.source_sha256, sha256=made.sha256)
    with pytest.raises(Refused, match="still read"):
        replay(c.fn, [Edit("delete", c.at("self.a(x)"))], source_sha256=made.source_sha256, sha256=made.sha256)
