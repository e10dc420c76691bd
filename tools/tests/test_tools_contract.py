"""The product's contract with vLLM: what our packages use exists, and fits, in the installed build and in each recorded one."""

from __future__ import annotations

import dataclasses
import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest
from tf_tools.contract import (
    CLAIMS,
    Surface,
    Uses,
    check_claims,
    check_ledgers,
    check_surface,
    collect,
    from_installed,
    recorded,
    sources,
    survey,
)

PACKAGES = Path(__file__).parents[2] / "packages"


@pytest.fixture(scope="module")
def uses() -> Uses:
    return collect(sources(PACKAGES))


@pytest.fixture(scope="module")
def installed(uses: Uses) -> Surface:
    return survey(from_installed(), uses.uses, CLAIMS)


def test_the_installed_build_has_everything_that_we_use(uses: Uses, installed: Surface) -> None:
    assert [str(problem) for problem in check_surface(uses.uses, installed)] == []


def test_the_installed_build_is_what_our_own_tables_and_classes_repeat(installed: Surface) -> None:
    assert [str(problem) for problem in check_claims(installed, PACKAGES)] == []


@pytest.mark.parametrize("surface", recorded(), ids=lambda surface: surface.source)
def test_each_recorded_build_has_everything_that_we_use(uses: Uses, surface: Surface) -> None:
    """A use that is new is not in the record: the problem says how to record again."""
    assert [str(problem) for problem in check_surface(uses.uses, surface)] == []
    assert [str(problem) for problem in check_claims(surface, PACKAGES)] == []


def test_private_names_derived_classes_and_writes_have_a_reason(uses: Uses, installed: Surface) -> None:
    """Also that no layer of vLLM is derived from, and that vLLM is not patched without an entry in the ledger."""
    assert [str(problem) for problem in check_ledgers(uses, installed)] == []


def test_the_cuda_build_that_the_package_asks_for_is_recorded() -> None:
    assert "vllm 0.33.0" in {surface.source for surface in recorded()}


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("vllm.config:VllmConfig().parallel_config.tensor_parallel_size", "attribute"),
        ("vllm.config:VllmConfig().additional_config", "write"),
        ("vllm.model_executor.layers.linear:QKVParallelLinear", "call"),
        ("vllm.model_executor.layers.linear:QKVParallelLinear().weight_loader", "call"),
        ("vllm.model_executor.layers.attention:Attention().sliding_window", "attribute"),
        ("vllm.compilation.decorators:support_torch_compile", "call"),
        ("vllm.v1.engine.llm_engine:LLMEngine.from_engine_args().step()[*].request_id", "attribute"),
        ("vllm.envs:VLLM_CPU_OMP_THREADS_BIND", "environment"),
        ("vllm-serve:additional_config", "option"),
    ],
)
def test_uses_of_every_sort_are_found(uses: Uses, path: str, kind: str) -> None:
    """Guards against a collector that finds nothing, and so no problem."""
    assert any(use.path == path and use.kind == kind for use in uses.uses)


def test_a_keyword_that_a_layer_does_not_take_would_be_seen(uses: Uses, installed: Surface) -> None:
    """Each keyword of each call of ours is held against the signature: rename one parameter there, and the call is a problem."""
    path = "vllm.model_executor.layers.linear:QKVParallelLinear"
    (definition,) = installed.entries[path].definitions
    assert definition.signature is not None
    renamed = tuple(
        dataclasses.replace(one, name="v_size") if one.name == "v_head_size" else one for one in definition.signature
    )
    entry = dataclasses.replace(
        installed.entries[path], definitions=(dataclasses.replace(definition, signature=renamed),)
    )
    broken = dataclasses.replace(installed, entries={**installed.entries, path: entry})
    (problem,) = check_surface(uses.uses, broken)
    assert problem.path == path
    assert "no parameter `v_head_size`" in problem.what
    assert problem.places[0].file == "vllm_layers_bridge/layers/linear.py"


_TRUTH = """
import importlib, inspect, json, sys
asked = json.load(sys.stdin)
found = {}
for where in asked:
    module, _, name = where.partition(":")
    thing = importlib.import_module(module)
    for part in name.split("."):
        thing = getattr(thing, part)
    found[where] = [
        [one.name, one.kind.name, one.default is not inspect.Parameter.empty]
        for one in inspect.signature(thing).parameters.values() if one.name != "self"
    ]
print("\\n" + json.dumps(found))
"""


@pytest.mark.engine
def test_signatures_read_from_source_are_those_of_the_imported_engine(installed: Surface) -> None:
    kinds = {
        "positional": inspect.Parameter.POSITIONAL_ONLY.name,
        "normal": inspect.Parameter.POSITIONAL_OR_KEYWORD.name,
        "*": inspect.Parameter.VAR_POSITIONAL.name,
        "keyword": inspect.Parameter.KEYWORD_ONLY.name,
        "**": inspect.Parameter.VAR_KEYWORD.name,
    }
    read = {
        one.where: [
            [parameter.name, kinds[parameter.kind], parameter.default is not None] for parameter in one.signature
        ]
        for entry in installed.entries.values()
        for one in entry.definitions
        if one.signature is not None and one.kind in {"class", "function"} and one.where.startswith("vllm.")
    }
    assert len(read) > 30
    done = subprocess.run(
        [sys.executable, "-c", _TRUTH], input=json.dumps(sorted(read)), capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout.strip().splitlines()[-1]) == read
