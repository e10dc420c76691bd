"""Which experts the engine has kernels for, and whether their tokens go from rank to rank.

In: vLLM's own selection of a kernel for unquantized experts, its communicator. Out: names of activations, what sizes must be multiples of.
The selection does not look at the constants of an activation, and most kernels leave them out without a word: where there are some, only
the kernel that is known to take them counts.
"""

from __future__ import annotations

import moe_runner
from moe_runner import Gate

_SIZE = 1024
_ADJUSTABLE = (Gate("silu_clamped", limit=2.5), Gate("swiglu_oai", limit=2.5, alpha=1.25))


def moe_activations() -> tuple[str, ...]:
    """Names, sorted, as `moe_runner.engine_activation` gives them."""
    known = dict(moe_runner.ACTIVATIONS)
    for gate in _ADJUSTABLE:
        known |= dict.fromkeys(moe_runner.names_of(gate), gate)
    return tuple(sorted(name for name, gate in known.items() if _has_kernel(name, gate, _SIZE)))


def moe_size_multiple() -> int:
    """The smallest power of two that a hidden size may be an odd multiple of."""
    sizes = (1 << exponent for exponent in range(10))
    return next((size for size in sizes if _has_kernel("silu", Gate("silu"), _SIZE + size)), _SIZE)


def moe_exchanges_tokens() -> bool:
    """Whether the platform's communicator has what vLLM's exchange of tokens between data-parallel ranks calls."""
    from vllm.distributed.device_communicators.base_device_communicator import DeviceCommunicatorBase
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname

    communicator = resolve_obj_by_qualname(current_platform.get_device_communicator_cls())
    has_gather = communicator.all_gatherv is not DeviceCommunicatorBase.all_gatherv
    return has_gather and communicator.reduce_scatterv is not DeviceCommunicatorBase.reduce_scatterv


def _has_kernel(name: str, gate: Gate, hidden_size: int) -> bool:
    import torch
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import select_unquantized_moe_backend
    from vllm.platforms import current_platform

    asked = moe_runner.asked_of_engine(gate, name)
    try:
        config = FusedMoEConfig(
            num_experts=8,
            experts_per_token=2,
            hidden_dim=hidden_size,
            intermediate_size=_SIZE,
            num_local_experts=8,
            num_logical_experts=8,
            activation=MoEActivation.from_str(asked.name),
            device=current_platform.device_type,
            routing_method=RoutingMethodType.Custom,
            moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
            in_dtype=torch.bfloat16,
            swiglu_limit=asked.limit,
            swiglu_alpha=asked.alpha,
            swiglu_beta=asked.beta,
        )
        _, kernel = select_unquantized_moe_backend(config)
    except (ValueError, NotImplementedError, AssertionError):
        return False
    return asked.limit is None or _takes_constants(kernel)


def _takes_constants(kernel: type | None) -> bool:
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    return kernel is not None and issubclass(kernel, TritonExperts)
