"""A generated module as data, and the module that its text becomes.

In: the text of a Python module that defines a class `Block`, and how it is instantiated and called. Out: instances with random weights, on
meta or in memory. The text lies in a real file, so that every node of a trace has its span.
"""

from __future__ import annotations

import hashlib
import importlib.util
import itertools
import linecache
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

HIDDEN = 8
HEAD_DIM = 4
_count = itertools.count()


@dataclass(frozen=True, slots=True)
class Program:
    """One example.

    text: a Python module with a class `Block`, whose forward takes [batch, tokens, HIDDEN] and, where `has_rotary`, a pair of
        [batch, tokens, HEAD_DIM] behind it.
    instances: keyword arguments of each `Block` of the model, whose instances may be of several variants.
    features: width of the last axis of the input.
    is_keyword: whether the input is passed by keyword, under the name `input_name`.
    """

    kind: str
    text: str
    instances: tuple[Mapping[str, object], ...] = ({},)
    has_rotary: bool = False
    features: int = HIDDEN
    input_name: str = "x"
    is_keyword: bool = False

    def __str__(self) -> str:
        made = "\n".join(f"# Block({', '.join(f'{k}={v!r}' for k, v in given.items())})" for given in self.instances)
        return f"{self.text.rstrip()}\n\n{made}"


class Positions(nn.Module):
    """Cosines and sines, [batch, tokens, HEAD_DIM] each, every value twice."""

    def forward(self, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of positions [batch, tokens]."""
        frequencies = 0.7 ** torch.arange(HEAD_DIM // 2, device=position_ids.device)
        angles = position_ids[..., None].float() * frequencies
        both = torch.cat((angles, angles), dim=-1)
        return both.cos(), both.sin()


class Model(nn.Module):
    """What holds the instances, as far as planning asks: `layers`, and a config that says how attention is computed."""

    def __init__(self, layers: list[nn.Module], config: Any) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.positions = Positions()
        self.config = config
        self.tp_plan: dict[str, str] = {}

    def _init_weights(self, module: nn.Module) -> None:
        """No buffer is in need of it."""

    def get_input_embeddings(self) -> nn.Module | None:
        """There are none."""
        return None


@dataclass(slots=True)
class Loaded:
    """The Python module of a program."""

    program: Program
    block: type[nn.Module]
    folder: Path = field(repr=False)

    def model(self, *, on_meta: bool) -> Model:
        """All instances, in memory with weights of such a size that every part matters; or on meta."""
        config = SimpleNamespace(_attn_implementation="eager")
        with torch.device("meta" if on_meta else "cpu"):
            layers = [self.block(config, **given) for given in self.program.instances]
        model = Model(layers, config)
        if not on_meta:
            _draw(model)
        return model.eval().requires_grad_(False)


@contextmanager
def loaded(program: Program) -> Iterator[Loaded]:
    """Write the text to a file and import it; both are gone afterwards."""
    name = f"fuzzed_{next(_count)}"
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder:
        path = Path(folder, f"{name}.py")
        path.write_text(program.text, encoding="utf-8")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
            yield Loaded(program, module.Block, Path(folder))
        finally:
            del sys.modules[name]
            linecache.cache.pop(str(path), None)


def arguments(
    program: Program, batch: int, tokens: int, positions: nn.Module, device: str = "cpu"
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What a block is called with: the same numbers for the same sizes."""
    if device == "meta":
        x = torch.empty((batch, tokens, program.features), device="meta")
    else:
        generator = torch.Generator().manual_seed(batch * 1000 + tokens)
        x = torch.randn((batch, tokens, program.features), generator=generator)
    rotary: tuple[Any, ...] = ()
    if program.has_rotary:
        rotary = (positions(torch.arange(tokens, device=device).expand(batch, tokens)),)
    if program.is_keyword:
        return (), {program.input_name: x, **({"position_embeddings": rotary[0]} if rotary else {})}
    return (x, *rotary), {}


@torch.no_grad()
def _draw(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "little")
        fresh = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        parameter.copy_(parameter + fresh * 0.25 if parameter.ndim < 2 and "norm" in name else fresh * 0.4)
