"""Experts in vLLM's fused runner, routed inside or outside.

In: an `ExpertsSpec`. Out: a module that is called as the experts that it takes the place of. vLLM is imported when one is built.
Inside: it is given the logits of a `RouterLogits` in the place of weights, and vLLM's own router makes ids and weights of them.
Outside: whoever calls it says which experts each token goes to, and with which weights. vLLM's runner takes router scores, and a function
that turns them into ids and weights. Then the scores are the ids and weights themselves, side by side in one float32 tensor
[tokens, 2 k], and the function takes them apart. So every kernel, exchange between ranks and compile path of vLLM's is used as it is.
Ids are exact in float32 up to 2**24.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_runner._activations import asked_of_engine
from moe_runner._engine_router import LEAST_LOGIT, engine_arguments
from moe_runner._errors import NotRunnable
from moe_runner._loading import ExpertLoader
from moe_runner._parts import in_parts
from moe_runner._ranks import copies_of, places_on_rank, rank_arguments
from moe_runner.routers import RouterForm
from moe_runner.shared_layer import Scaled, SharedExperts
from moe_runner.specs import ExpertsSpec

_MOST_EXPERTS = 1 << 24


class RoutedExperts(nn.Module):
    """Experts that are told which tokens they get.

    Args:
        spec: what they compute.
        runner: vLLM's `MoERunner`, built for them.
        places: for each expert its place among those of this rank, or -1, [experts]; None where the runner knows by itself.
        splits_tokens: tensor-parallel ranks, which hold the same tokens, each send a part of them to experts (sequence parallel).
        beside: shared experts that the runner does not call: their share of a rank is one of all tokens, and it is given a part of them.
    """

    places: Tensor | None

    def __init__(
        self,
        spec: ExpertsSpec,
        runner: nn.Module,
        places: Tensor | None = None,
        splits_tokens: bool = False,
        beside: SharedExperts | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.runner = runner
        self._arguments = spec.arguments
        self._null = spec.null
        self._experts = spec.num_experts
        self._takes_rows = spec.takes_rows
        self._form = None if spec.routing is None else spec.routing.form
        self._splits_tokens = splits_tokens
        self.beside = beside
        self.register_buffer("places", places, persistent=False)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """What the experts give, of the shape of the hidden states [..., hidden]; ids and weights are [tokens, k].

        Of experts that are called with rows: what each gives for its rows.
        """
        given = [args[place] if isinstance(place, int) else kwargs[place] for place in self._arguments]
        if self._takes_rows:
            return self._of_rows(given[0])
        hidden, ids, weights = given
        flat = hidden if hidden.ndim == 2 else hidden.reshape(-1, hidden.shape[-1])
        weights = weights.to(torch.float32)
        if self._form is not None:
            return self._send(flat, within_reach(self._form, weights)).view(hidden.shape)
        if self._null is None:
            return self._run(flat, ids, weights).view(hidden.shape)
        is_null = ids >= self._experts
        routed = self._run(flat, ids.masked_fill(is_null, 0), weights.masked_fill(is_null, 0.0))
        if self._null == "identity":
            routed = routed + flat * (weights * is_null).sum(dim=-1, keepdim=True).to(flat.dtype)
        return routed.view(hidden.shape)

    def _of_rows(self, rows: Tensor) -> Tensor:
        """Only the rows of a token that are not zeros are computed, `top_k` of them, each as a token with one expert."""
        of_token = rows.reshape(self._experts, -1, rows.shape[-1]).transpose(0, 1)
        ids = (of_token != 0).any(dim=-1).to(torch.float32).topk(self.spec.top_k, dim=-1).indices
        at = ids[..., None].expand(*ids.shape, rows.shape[-1])
        chosen = of_token.gather(1, at).reshape(-1, rows.shape[-1])
        ids = ids.reshape(-1, 1)
        out = self._run(chosen, ids, torch.ones_like(ids, dtype=torch.float32))
        return torch.zeros_like(of_token).scatter(1, at, out.view(at.shape)).transpose(0, 1).reshape(rows.shape)

    def _run(self, flat: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        if self.places is not None:  # what other ranks add counts nothing here
            ids = self.places[ids]
            ids, weights = ids.clamp(min=0), weights.masked_fill(ids < 0, 0.0)
        return self._send(flat, torch.cat((weights, ids.to(torch.float32)), dim=-1))

    def _send(self, flat: Tensor, scores: Tensor) -> Tensor:
        if self._splits_tokens:
            routed = in_parts(self.runner, flat, scores)
            return routed if self.beside is None else routed + self.beside.over_ranks(flat)
        out: Tensor = self.runner(flat, scores)
        return out


def as_given(hidden_states: Tensor, gating_output: Tensor, topk: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """The routing function of vLLM's runner: weights and ids [tokens, topk] as they were packed into `gating_output`."""
    weights, ids = gating_output[:, :topk], gating_output[:, topk:]
    return weights.contiguous(), ids.to(torch.int32).contiguous()


def within_reach(form: RouterForm, logits: Tensor) -> Tensor:
    """Logits of which vLLM's router makes finite weights, as `form` does, whose epsilon it leaves out; where they do, the same ones.

    Scores in float32 vanish for logits below -103, for a softmax so far below the largest: a sum of nothing but such is zero.
    """
    if not form.epsilon:
        return logits
    if form.score == "sigmoid":
        return logits.clamp(min=LEAST_LOGIT)
    return torch.maximum(logits, logits.amax(dim=-1, keepdim=True) + LEAST_LOGIT)


def _scaling(factor: float, shared: SharedExperts | None) -> dict[str, Any]:
    """How the runner is told of a factor on the routed experts alone: not all of vLLM's routers know one."""
    if factor == 1.0:
        return {}
    if shared is not None:
        return {"routed_output_transform": Scaled(factor)}
    return {"routed_scaling_factor": factor, "apply_routed_scale_to_output": True}


def build_experts(
    spec: ExpertsSpec,
    prefix: str,
    quant_config: Any = None,
    correction: Tensor | None = None,
    shared: SharedExperts | None = None,
) -> RoutedExperts:
    """Build the layer on the current device and in the current default dtype, its weights not loaded.

    Args:
        prefix: full name, unique in the model; vLLM wants exactly one integer in it.
        quant_config: the engine's.
        correction: what a router inside adds to scores for the choice, of one entry per expert: the tensor that will be loaded.
        shared: the spec's shared experts, from `build_shared`.

    Raises:
        ValueError: there is a correction, and the spec's form has none, or the other way round; shared experts likewise.
        NotRunnable: the installed vLLM has no kernel for these sizes, or this activation, on these ranks; or tokens or experts would go
            astray between ranks.
    """
    if not spec.runs_as:
        raise NotRunnable(f"`{prefix}` ({spec.gate}) has no activation of the engine's: set `runs_as`.")
    if spec.num_experts > _MOST_EXPERTS:
        raise NotRunnable(f"`{prefix}` has {spec.num_experts} experts; ids beyond {_MOST_EXPERTS} are not exact.")
    asked = asked_of_engine(spec.gate, spec.runs_as)
    routing: dict[str, Any] = {"renormalize": False, "custom_routing_function": as_given}
    is_biased = spec.routing is not None and spec.routing.form.biased
    if is_biased is not (correction is not None):
        raise ValueError(f"`{prefix}`: a correction goes with a router inside that is biased, and with no other")
    if (spec.shared is None) is not (shared is None) or (shared is not None and spec.takes_rows):
        raise ValueError(f"`{prefix}`: shared experts go with a spec that has them, of experts that are given tokens")
    from vllm.config import get_current_vllm_config
    from vllm.model_executor.layers.fused_moe import FusedMoEFactory

    if spec.routing is not None:
        routing = engine_arguments(spec.routing.form) | {"router_logits_dtype": torch.float32}
        if correction is not None:
            routing["e_score_correction_bias"] = correction.detach().view(-1)
        routing |= _scaling(spec.routing.form.scaling, shared)
    ranks = rank_arguments(get_current_vllm_config().parallel_config, spec, prefix)
    splits_tokens = ranks["is_sequence_parallel"]
    try:
        runner: nn.Module = FusedMoEFactory(
            num_experts=spec.num_experts,
            top_k=1 if spec.takes_rows else spec.top_k,
            hidden_size=spec.hidden_size,
            intermediate_size=spec.intermediate_size,
            **routing,
            **ranks,
            quant_config=quant_config,
            activation=asked.name,
            swiglu_limit=asked.limit,
            swiglu_alpha=asked.alpha,
            swiglu_beta=asked.beta,
            has_bias=spec.has_bias,
            ckpt_names=("gate", "down", "up" if spec.gate.gated else None),
            prefix=prefix,
            shared_experts=None if splits_tokens else shared,
        )
    except (ValueError, NotImplementedError, AssertionError) as error:
        raise NotRunnable(f"vLLM's runner cannot take `{prefix}` ({spec.gate}): {error}") from error
    routed: Any = runner.routed_experts
    beside = shared if splits_tokens else None
    layer = RoutedExperts(spec, runner, places_on_rank(routed, spec, prefix), splits_tokens, beside)
    copies = copies_of(spec.num_experts, ranks["num_redundant_experts"])
    ExpertLoader(spec, asked.interleaved, routed, copies).attach()
    return layer
