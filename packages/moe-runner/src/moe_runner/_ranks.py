"""Experts over ranks: which of them lie where, and what cannot be right between ranks.

In: an `ExpertsSpec`, vLLM's config, its module of expert weights. Out: arguments of vLLM's factory, places of experts, or `NotRunnable`.

A logical expert is one that the model has. Where experts are balanced over ranks (vLLM's EPLB), physical ones hold their weights, some
logical ones in several copies (redundant experts), and vLLM's router turns ids of logical experts into ids of physical ones. Without it
each logical expert is one physical expert of the same id.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_runner._errors import NotRunnable
from moe_runner.specs import ExpertsSpec

if TYPE_CHECKING:
    from vllm.config import ParallelConfig


def kernels_map_experts() -> bool:
    """Whether this platform's kernels look at the map of experts to ranks: those of vLLM's CPU platform are handed it and do not."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def rank_arguments(parallel: ParallelConfig, spec: ExpertsSpec, prefix: str) -> dict[str, Any]:
    """What vLLM's factory is to be told of ranks.

    Raises:
        NotRunnable: tokens or experts would go astray; the message says how.
    """
    exchanges = parallel.data_parallel_size > 1
    if spec.rows_of_a_token > 1 and (exchanges or parallel.enable_eplb):
        what = "data-parallel ranks exchange" if exchanges else "the load of balanced experts is counted of"
        raise NotRunnable(
            f"`{prefix}` takes {spec.rows_of_a_token} rows of each token, and {what} as many rows as there are tokens."
        )
    if not kernels_map_experts():
        what = "their places on one rank and not on another"
        if parallel.enable_eplb:
            raise NotRunnable(
                f"`{prefix}`: experts are balanced over ranks, and this platform's kernels are told {what}."
            )
        if exchanges and parallel.enable_expert_parallel:
            raise NotRunnable(
                f"`{prefix}`: data-parallel ranks exchange the ids of experts, and this platform's kernels are told {what}."
            )
    return {
        "enable_eplb": parallel.enable_eplb,
        "num_redundant_experts": parallel.eplb_config.num_redundant_experts,
        "is_sequence_parallel": parallel.use_sequence_parallel_moe,
    }


def copies_of(experts: int, redundant: int) -> tuple[tuple[int, ...], ...]:
    """For each of `experts` logical experts the physical ones that hold it from the start, in vLLM's own arrangement."""
    if not redundant:
        return tuple((expert,) for expert in range(experts))
    from vllm.distributed.eplb.eplb_state import EplbState

    copies: list[list[int]] = [[] for _ in range(experts)]
    for physical, logical in enumerate(EplbState.build_initial_global_physical_to_logical_map(experts, redundant)):
        copies[logical].append(physical)
    return tuple(map(tuple, copies))


def places_on_rank(routed: Any, spec: ExpertsSpec, prefix: str) -> Tensor | None:
    """For each expert its place among those of this rank, or -1, where kernels are told places; else None.

    Raises:
        NotRunnable: the runner chooses among the experts itself, and would choose among those of this rank.
    """
    places: Tensor | None = None if kernels_map_experts() else routed.expert_map
    if places is not None and spec.routing is not None:
        raise NotRunnable(
            f"`{prefix}`: where experts are dealt out over ranks, this platform's kernels are told their places."
        )
    return places
