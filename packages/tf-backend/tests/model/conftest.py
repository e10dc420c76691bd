"""A planned decoder on several real ranks, without an engine: forked processes, vLLM's layers and collectives, attention written out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from tf_backend import capabilities
from tf_backend.model.skeleton import skeleton
from tf_backend.plan.planner import Planned, make_plan
from tf_backend.plan.schema import Parallel
from tf_tools.checkpoints import build_model
from tf_tools.ranks import on_ranks as ranks_of_tools
from torch import nn
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

BuildOnRank = Callable[[PreTrainedModel, PreTrainedModel, Planned], None]

TOKENS = 48  # longer than any window of the recipes


@dataclass(frozen=True)
class OnRanks:
    """What transformers gives and what the ranks give, last hidden states [tokens, hidden]; and the plan."""

    reference: torch.Tensor
    found: torch.Tensor
    planned: Planned

    @property
    def error(self) -> float:
        """The largest difference, as a part of the largest entry."""
        return float((self.found - self.reference).abs().max() / self.reference.abs().max())


class WrittenOut(nn.Module):
    """Attention of one sequence from its first token on, with the interface of vLLM's layer."""

    def __init__(self, num_heads: int, head_size: int, scale: float, num_kv_heads: int, **options: Any) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_size, self.scale = num_heads, num_kv_heads, head_size, scale
        self.sliding_window, self.cap = options["per_layer_sliding_window"], options["logits_soft_cap"]
        self.sinks = options.get("sinks")

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        tokens = query.shape[0]
        q, k, v = (part.view(tokens, -1, self.head_size).transpose(0, 1) for part in (query, key, value))
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 0) for part in (k, v))
        scores = q @ k.transpose(1, 2) * self.scale
        if self.cap:
            scores = torch.tanh(scores / self.cap) * self.cap
        age = torch.arange(tokens)[:, None] - torch.arange(tokens)[None]
        seen = (age >= 0) & (age < (self.sliding_window or tokens))
        scores = scores.masked_fill(~seen, float("-inf"))
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.view(-1, 1, 1).expand(-1, tokens, 1)), -1)
        weights = scores.softmax(-1)[..., :tokens]
        return (weights @ v).transpose(0, 1).reshape(tokens, -1)


@pytest.fixture
def on_ranks() -> Callable[..., OnRanks]:
    """`on_ranks("olmo2", 2, num_key_value_heads=1)`: a recipe or model type, split over that many processes."""

    def run(name: str, ranks: int, **overrides: Any) -> OnRanks:
        model = build_model(name, overrides=overrides or None)
        config = model.config
        architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
        config.architectures = [architecture if isinstance(architecture, str) else architecture[0]]
        config._attn_implementation = "eager"
        tokens = torch.randint(3, config.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            reference = _run(model.base_model, tokens)
        served = skeleton(config)
        planned = make_plan(served, Parallel(tensor=ranks), capabilities.default())
        assert planned.plan.is_served, [str(refusal) for refusal in planned.plan.refusals]
        found = ranks_of_tools(_hidden, model, served, planned, tokens, tensor=ranks)
        return OnRanks(reference, found[0], planned)

    return run


@pytest.fixture
def build_on_rank() -> BuildOnRank:
    """`build_on_rank(model, served, planned)`: make of `served`, planned on meta, what serves `model` on this rank, with its weights."""
    return _build


def _run(base: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    output = base(input_ids=tokens[None], position_ids=torch.arange(len(tokens))[None], use_cache=False)
    hidden: torch.Tensor = output.last_hidden_state[0]
    return hidden


def _hidden(model: PreTrainedModel, served: PreTrainedModel, planned: Planned, tokens: torch.Tensor) -> torch.Tensor:
    from vllm.config import get_current_vllm_config
    from vllm.forward_context import set_forward_context

    _build(model, served, planned)
    with set_forward_context(None, get_current_vllm_config()):
        return _run(served.get_submodule(planned.plan.base), tokens)


def _build(model: PreTrainedModel, served: PreTrainedModel, planned: Planned) -> None:
    from tf_backend.model.apply import Engine, apply
    from tf_backend.weights.checkpoint import weight_loader

    on_rank = Engine(planned.plan.provenance.parallel.tensor, None, None, torch.device("cpu"), 256)
    with mock.patch("vllm.model_executor.layers.attention.Attention", WrittenOut):
        apply(planned.plan, planned.rewrites, served, on_rank, tabled=planned.tabled)
    targets = dict(served.named_buffers()) | dict(served.named_parameters(remove_duplicate=False))
    held = {id(tensor): name for name, tensor in reversed([*model.state_dict(keep_vars=True).items()])}
    weights = [
        (name, tensor.detach()) for name, tensor in model.state_dict(keep_vars=True).items() if held[id(tensor)] == name
    ]
    weight_loader(planned).load(weights, targets)
    for module in served.modules():
        if hasattr(module, "quant_method") and hasattr(module.quant_method, "process_weights_after_loading"):
            module.quant_method.process_weights_after_loading(module)
