"""What vLLM's balancer of experts over ranks asks of a model: its interface `MixtureOfExperts`.

In: the layers of a model whose experts run in vLLM's runner. Out: how many experts there are, which weights move with them, and layers that
know where each expert is. A model without such layers has none of the attributes, and vLLM takes it for one without experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import moe_runner
import torch
from moe_runner import RoutedExperts
from torch import nn

from tf_backend.errors import OptionRefused


class BalancedExperts:
    """Part of a served model. The attributes are vLLM's, and are set where there are layers to balance.

    Logical experts are those of a block, physical ones the places for them on all ranks, redundant the places beyond one for each. A
    pipeline stage counts the layers that it holds.
    """

    moe_layers: list[Any]
    """vLLM's `MoERunner` of each layer, in the order in which they run."""
    expert_weights: list[list[torch.Tensor]]
    """For each layer what moves with an expert: tensors [local physical experts, features], views of the parameters."""
    num_moe_layers: int
    num_expert_groups: int
    """Groups that the router chooses among before it chooses experts; 1 where it has none, or is not vLLM's."""
    num_logical_experts: int
    num_physical_experts: int
    num_local_physical_experts: int
    num_routed_experts: int
    num_shared_experts: int
    """0: they are layers of their own, outside of the runner."""
    num_redundant_experts: int

    def count_experts(self, model: nn.Module) -> None:
        """Count the experts of `model` that run in vLLM's runner; nothing is set where there are none."""
        layers = [module for module in model.modules() if isinstance(module, RoutedExperts)]
        if not layers:
            return
        self._expert_layers = tuple(layers)
        self.moe_layers = [layer.runner for layer in layers]
        self.expert_weights = []
        self.num_moe_layers = len(layers)
        self.num_logical_experts = self.num_routed_experts = layers[0].spec.num_experts
        self.num_shared_experts = 0
        groups = {1 if layer.spec.routing is None else layer.spec.routing.form.groups for layer in layers}
        self.num_expert_groups = groups.pop() if len(groups) == 1 else 1
        routed = self.moe_layers[0].routed_experts
        self._count(routed.global_num_experts, routed.local_num_experts)

    def _count(self, physical: int, local: int) -> None:
        self.num_physical_experts = physical
        self.num_local_physical_experts = local
        self.num_redundant_experts = physical - self.num_logical_experts

    def set_eplb_state(
        self,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
    ) -> None:
        """Give each layer its row of the balancer's state, and say which weights move; called when weights are loaded.

        Args:
            expert_load_view: tokens that each physical expert got, [layers, physical], counted by the layers.
            logical_to_physical_map: physical experts of each logical one, [layers, logical, most copies], filled up with -1.
            logical_replica_count: how many they are, [layers, logical].

        Raises:
            OptionRefused: a kernel holds something of each expert that would not move with it.
        """
        for layer, runner in zip(self._expert_layers, self.moe_layers, strict=True):
            if staying := moe_runner.left_behind(layer):
                raise OptionRefused(
                    f"experts cannot be balanced over ranks: the kernel of `{runner.layer_name}` holds "
                    f"{', '.join(f'`{name}`' for name in staying)} for each expert, which vLLM does not move with it. Leave out "
                    "`--enable-eplb`, or choose another kernel with `--moe-backend`."
                )
        self.expert_weights = [list(runner.get_expert_weights()) for runner in self.moe_layers]
        for index, runner in enumerate(self.moe_layers):
            runner.set_eplb_state(index, expert_load_view, logical_to_physical_map, logical_replica_count)

    def update_physical_experts_metadata(self, num_physical_experts: int, num_local_physical_experts: int) -> None:
        """The number of ranks has changed, and with it that of physical experts; ValueError where that on a rank has."""
        if num_local_physical_experts != self.num_local_physical_experts:
            raise ValueError(
                f"a rank has room for {self.num_local_physical_experts} experts in each layer, and {num_local_physical_experts} are meant"
            )
        self._count(num_physical_experts, num_local_physical_experts)
        for runner in self.moe_layers:
            runner.update_expert_map()


def expert_specs(modules: Sequence[Any]) -> list[tuple[str, moe_runner.ExpertsSpec]]:
    """Names and specs of the modules of a plan whose experts run in vLLM's runner, in the order of the plan."""
    return [(m.name, spec) for m in modules for spec in m.layers if isinstance(spec, moe_runner.ExpertsSpec)]
