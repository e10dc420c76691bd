"""The path of a fusion in small: trace, match, check, rewrite, compile, layers; and real vLLM layers in a forked child."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from ast_rewrite import CompiledRewrite, FunctionSource, Patch
from fx_match import LeafCall, Match, Miss, Trace, trace
from torch import nn
from vllm_layers_bridge.fusions import Fusion, ModuleFacts
from vllm_layers_bridge.seams.leaf import attention_leaf
from vllm_layers_bridge.specs import (
    ActivationAndMulSpec,
    AttentionSpec,
    LayerSpec,
    MergedLinearSpec,
    QKVLinearSpec,
    Source,
)

torch.set_num_threads(1)  # before any other use: an OpenMP pool would not survive a fork

TEST_INTERFACE = "bridge_test"
GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Fused:
    """What a fusion made of one module."""

    module: nn.Module
    trace: Trace
    match: Match
    specs: tuple[LayerSpec, ...]
    rewrite: CompiledRewrite | None

    @property
    def text(self) -> str:
        assert self.rewrite is not None
        return self.rewrite.text

    def apply(self, load: Callable[[nn.Module, LayerSpec], None]) -> nn.Module:
        """The fused module, its layers built and loaded; to be called where vLLM is initialised."""
        from vllm_layers_bridge.layers import BuildContext, build

        if self.rewrite is None:
            (spec,) = self.specs
            built = build(spec, "model.layers.0.norm", BuildContext())
            load(built, spec)
            return built
        for spec in self.specs:
            layer = build(spec, f"model.layers.0.block.{spec.name}", BuildContext())
            load(layer, spec)
            self._place(spec, layer)
        return self._rewritten()

    def apply_plain(self) -> nn.Module:
        """The fused module with layers of torch that compute what the specs say, in the place of vLLM's."""
        for spec in self.specs:
            if isinstance(spec, ActivationAndMulSpec):
                self._place(spec, _PlainActivation(spec.activation))
                continue
            assert isinstance(spec, QKVLinearSpec | MergedLinearSpec)
            layer = nn.Linear(spec.in_features, sum(source.size for source in spec.sources), bias=spec.bias)
            children = [(self.module.get_submodule(source.child), source) for source in spec.sources]
            layer.weight.data = torch.cat([part_of(child.weight, source) for child, source in children])
            if spec.bias:
                layer.bias.data = torch.cat([part_of(child.bias, source) for child, source in children])
            self._place(spec, layer)
        return self._rewritten()

    def _place(self, spec: LayerSpec, layer: nn.Module) -> None:
        from vllm_layers_bridge.layers.linear import qkv_split_sizes

        if isinstance(spec, QKVLinearSpec | MergedLinearSpec):
            for child in dict.fromkeys(source.child for source in spec.sources):
                delattr(self.module, child)
        setattr(self.module, spec.name, layer)
        if isinstance(spec, QKVLinearSpec):
            setattr(self.module, spec.sizes_attribute, qkv_split_sizes(spec, 1))

    def _rewritten(self) -> nn.Module:
        cls = type(self.module)
        assert self.rewrite is not None
        self.module.__class__ = type(cls.__name__, (cls,), {"forward": self.rewrite.function})
        return self.module


class _PlainActivation(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        functions = {
            "silu": nn.functional.silu,
            "gelu": nn.functional.gelu,
            "gelu_tanh": lambda x: nn.functional.gelu(x, approximate="tanh"),
        }
        self.function = functions[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, dim=-1)
        return self.function(gate) * up


def part_of(tensor: torch.Tensor, source: Source) -> torch.Tensor:
    """What of a child's tensor goes into a merged layer."""
    if source.transposed and tensor.ndim == 2:
        tensor = tensor.t()
    return tensor if source.rows is None else tensor[source.rows[0] : source.rows[1]]


def _traced(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Trace:
    with torch.no_grad():
        return trace(module, args, kwargs, leaves=[LeafCall(attention_leaf)])


@pytest.fixture
def fuse(tmp_path: Path) -> Callable[..., Fused]:
    """`fuse(fusion, module, *args, facts=..., **kwargs)` on one module; fails where the fusion does not take it."""

    def run(fusion: Fusion, module: nn.Module, *args: Any, facts: ModuleFacts | None = None, **kwargs: Any) -> Fused:
        seen = _traced(module, args, kwargs)
        found = fusion.match(seen)
        assert isinstance(found, Match), str(found)
        facts = facts or ModuleFacts("block", args=args, kwargs=kwargs)
        fusion.check(found, module, facts)
        specs = fusion.layers(found, module, facts)
        rewrite = None
        if not fusion.replaces_module:
            patch = Patch(FunctionSource.of(type(module).forward))
            fusion.rewrite(found, seen, patch)
            rewrite = patch.compile(folder=tmp_path)
        return Fused(module, seen, found, specs, rewrite)

    return run


@pytest.fixture
def miss_of() -> Callable[..., Miss]:
    """`miss_of(fusion, module, *args, **kwargs)`: why the fusion does not match the module."""

    def run(fusion: Fusion, module: nn.Module, *args: Any, **kwargs: Any) -> Miss:
        found = fusion.match(_traced(module, args, kwargs))
        assert isinstance(found, Miss), f"matched {found}"
        return found

    return run


@pytest.fixture
def traced() -> Callable[..., Trace]:
    return lambda module, *args, **kwargs: _traced(module, args, kwargs)


@pytest.fixture
def golden() -> Callable[[str, str], None]:
    """Compare a text with the file of that name; `BRIDGE_WRITE_GOLDEN=1` writes the files anew."""

    def compare(name: str, text: str) -> None:
        path = GOLDEN / name
        if os.environ.get("BRIDGE_WRITE_GOLDEN") == "1":
            path.write_text(text)
        assert path.exists(), f"there is no {name}: set BRIDGE_WRITE_GOLDEN=1 to write it, and read what it says"
        assert text == path.read_text()

    return compare


@pytest.fixture
def attention_calls() -> Iterator[Callable[[nn.Module], None]]:
    """Have a module of transformers call the leaf where it would call an attention function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(TEST_INTERFACE, attention_leaf)

    def use(module: nn.Module) -> None:
        module.config._attn_implementation = TEST_INTERFACE  # type: ignore[union-attr]

    yield use
    type(ALL_ATTENTION_FUNCTIONS)._global_mapping.pop(TEST_INTERFACE, None)


@pytest.fixture
def attention_facts() -> Callable[..., ModuleFacts]:
    """Facts of a module that calls attention once, with heads of these numbers and width."""

    def make(num_heads: int, num_kv_heads: int, head_dim: int, value_head_dim: int | None = None) -> ModuleFacts:
        spec = AttentionSpec(num_heads, num_kv_heads, head_dim, value_head_dim or head_dim, head_dim**-0.5)
        return ModuleFacts("attention", (spec,))

    return make


@pytest.fixture
def in_vllm() -> Callable[..., Any]:
    """`in_vllm(function, *args)`: its result from a forked child in which vLLM is initialised for one rank."""
    from tf_tools.engine import warm
    from tf_tools.fork import run_in_fork

    warm()

    def run(function: Callable[..., Any], *args: Any) -> Any:
        return run_in_fork(_initialised, 120.0, function, *args).value()

    return run


def _initialised(function: Callable[..., Any], *args: Any) -> Any:
    import tempfile

    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    with tempfile.TemporaryDirectory() as folder, set_current_vllm_config(VllmConfig()), torch.no_grad():
        init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
        initialize_model_parallel(1)
        return function(*args)


@pytest.fixture
def loader() -> Callable[..., Callable[[nn.Module, LayerSpec], None]]:
    """`loader(weights, shards=..., skip=...)`: loads a built layer as a checkpoint would, by shard id.

    weights: by name in the original module. shards: shard id for a child in the place of the right one. skip: tensors left at zero.
    """

    def make(
        weights: dict[str, torch.Tensor], shards: dict[str, Any] | None = None, skip: tuple[str, ...] = ()
    ) -> Callable[[nn.Module, LayerSpec], None]:
        def load(layer: nn.Module, spec: LayerSpec) -> None:
            for leaf, parameter in layer.named_parameters():
                parameter.zero_()
                if leaf in skip:
                    continue
                if isinstance(spec, QKVLinearSpec | MergedLinearSpec):
                    for source in spec.sources:
                        shard = (shards or {}).get(source.child, source.shard)
                        if isinstance(shard, dict):  # of a packed child, by the shard that its part should have been
                            shard = shard[source.shard]
                        part = part_of(weights[f"{source.child}.{leaf}"], source)
                        parameter.weight_loader(parameter, part, shard)
                else:
                    parameter.copy_(weights[leaf])
            if hasattr(layer, "quant_method"):
                layer.quant_method.process_weights_after_loading(layer)

        return load

    return make
