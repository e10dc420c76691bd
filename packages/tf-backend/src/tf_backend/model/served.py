"""The classes that vLLM finds under its backend's names: plan, apply, load, forward, logits.

Imports vLLM: only the plugin imports this module. In: the engine's config. Out: a model that the engine runs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.sequence import IntermediateTensors
from vllm_layers_bridge.seams.row import Row

from tf_backend.errors import ModelRefused
from tf_backend.model.apply import Engine, apply
from tf_backend.model.balance import BalancedExperts
from tf_backend.model.decoder import Decoder
from tf_backend.model.head import Head
from tf_backend.model.options import publish_plan
from tf_backend.model.prepare import prepare
from tf_backend.model.stage import Passage, absent_modules, lies_in, make_stage
from tf_backend.names import REFUSED
from tf_backend.plan.counted import counting_modules
from tf_backend.plan.positions import position_notes
from tf_backend.plan.schema import Plan, Refusal

HIDDEN = "hidden_states"
"""Name under which hidden states pass from one pipeline stage to the next."""

logger = logging.getLogger("vllm.tf_backend")  # below vLLM's root logger, so that its handlers and levels apply


@dataclass(frozen=True, slots=True)
class _Parts:
    """What runs, held outside of the module tree: parameters keep the names that transformers gives them."""

    decoder: Decoder
    head: Head | None
    embedding: nn.Module


@dataclass(frozen=True, slots=True)
class _Stage:
    """The pipeline stage of this process: which modules it does not hold, and where hidden states pass."""

    passage: Passage | None
    absent: frozenset[str]
    is_last: bool

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> _Stage:
        """Cut `model`, on meta, down to this process's stage."""
        if plan.stages is None:
            return cls(None, frozenset(), True)
        group = get_pp_group()
        passage = Passage()
        make_stage(model, plan.stages, plan.layers, group.rank_in_group, passage)
        return cls(passage, absent_modules(plan.stages, plan.layers, group.rank_in_group), group.is_last_rank)


class TransformersForCausalLM(BalancedExperts, nn.Module):
    """A transformers causal language model, fused by plan and run by the engine."""

    supports_pp: ClassVar[Literal[True]] = True

    @classmethod
    def check(cls, vllm_config: VllmConfig) -> None:
        """Raise what building the model would raise, before an engine is started; see `prepare`."""
        prepare(vllm_config)

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        prepared = prepare(vllm_config)
        model, planned = prepared.model, prepared.planned
        plan = planned.plan
        publish_plan(vllm_config, plan)
        assert plan.head is not None
        self.plan = plan
        self.config = vllm_config.model_config.hf_config
        stage = _Stage.of(model, plan)
        self.loader = prepared.loader
        self.loader.leave_out(rule.target for rule in plan.weights if lies_in(rule.target, stage.absent))
        device = torch.get_default_device()
        row = Row() if counting_modules(plan.modules, plan.variants) else None
        apply(
            plan,
            planned.rewrites,
            model,
            Engine(
                prepared.parallel.tensor,
                vllm_config.cache_config,
                vllm_config.quant_config,
                device,
                vllm_config.model_config.max_model_len,
            ),
            prefix,
            planned.tabled,
            stage.absent,
            row,
        )
        for name, child in model.named_children():
            self.add_module(name, child)
        self.count_experts(model)
        decoder = Decoder(
            vllm_config=vllm_config,
            prefix=prefix,
            base=model.get_submodule(plan.base),
            passage=stage.passage,
            row=row,
            sends=not stage.is_last,
        )
        head = None
        if stage.is_last:
            projection = model.get_submodule(plan.head.linear.name)
            modules = {name: model.get_submodule(name) for name in plan.head.modules}
            head = Head(plan.head, projection, getattr(projection, "bias", None), modules)
        self._parts = _Parts(decoder, head, model.get_input_embeddings())
        self._log()
        for note in position_notes(plan, vllm_config.model_config.max_model_len):
            logger.warning(note)

    def _log(self) -> None:
        for count in self.plan.summary():
            logger.info("%s: %s x %d", count.cls, count.fusion, count.count)
        for variant in self.plan.variants:
            for miss in variant.misses:
                logger.warning("%s: %s not applied: %s", variant.class_name, miss.fusion, miss.reason)
        for latent in self.plan.latent:
            logger.info(str(latent))
        fused = sum(count.count for count in self.plan.summary())
        logger.info(
            "tf-backend serves %s: %d fusions, plan %s",
            self.plan.provenance.architecture,
            fused,
            self.plan.hash[:12],
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Embeddings [tokens, hidden] of tokens [tokens]."""
        embedded: torch.Tensor = self._parts.embedding(input_ids)
        return embedded

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """Last hidden state [tokens, hidden]; on a pipeline stage that another follows, what it is to be given."""
        received = None if intermediate_tensors is None else intermediate_tensors[HIDDEN]
        if inputs_embeds is not None or received is not None:
            input_ids = None
        hidden: torch.Tensor = self._parts.decoder(input_ids, positions, inputs_embeds, received)
        return hidden if self._parts.head is not None else IntermediateTensors({HIDDEN: hidden})

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What a stage that is not the first is given: hidden states [batch_size, hidden]."""
        width = self.plan.stages.width if self.plan.stages is not None else self.config.get_text_config().hidden_size
        return IntermediateTensors({HIDDEN: torch.zeros((batch_size, width), dtype=dtype, device=device)})

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor | None:
        """Logits [tokens, vocabulary] of last hidden states [tokens, hidden]."""
        assert self._parts.head is not None
        logits: torch.Tensor | None = self._parts.head(hidden_states)
        return logits

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Fill every parameter from `weights`; CheckpointError for a tensor that is missing, left over or misshapen."""
        targets: dict[str, nn.Parameter | torch.Tensor] = dict(self.named_buffers())
        targets.update(self.named_parameters(remove_duplicate=False))
        return self.loader.load(weights, targets)


class TransformersMoEForCausalLM(TransformersForCausalLM):
    """The name under which vLLM asks for models with experts: planned the same way, and refused or served by what the plan finds."""


class _Refusing(nn.Module):
    """Refuses at once, by the name of what it would serve."""

    what: ClassVar[str] = ""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.check(vllm_config)

    @classmethod
    def check(cls, vllm_config: VllmConfig) -> None:
        """Raise `ModelRefused`."""
        architecture = (vllm_config.model_config.architectures or [""])[0]
        raise ModelRefused(
            [
                Refusal(
                    reason=f"tf-backend does not serve {cls.what} yet",
                    module="",
                    place=None,
                    remedy="Use vLLM's own implementation with `--model-impl vllm` where it has one.",
                )
            ],
            architecture=architecture,
        )

    def embed_input_ids(self, input_ids: torch.Tensor) -> torch.Tensor:
        """Part of the interface by which vLLM recognises a model; never reached."""
        raise AssertionError("a refused model does not run")

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **_: Any) -> torch.Tensor:
        """Part of the interface by which vLLM recognises a model; never reached."""
        raise AssertionError("a refused model does not run")

    def compute_logits(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Part of the interface by which vLLM recognises a model; never reached."""
        raise AssertionError("a refused model does not run")


def refusing_class(name: str) -> type[nn.Module]:
    """The class registered under `name`, one of `tf_backend.names.REFUSED`."""
    is_pooling = "Embedding" in name or "Classification" in name
    return type(name, (_Refusing,), {"what": REFUSED[name], "is_pooling_model": is_pooling, "__module__": __name__})
