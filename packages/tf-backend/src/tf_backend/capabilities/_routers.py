"""Which forms of routers the engine's runner has.

In: the router that vLLM makes for each form. Out: names of forms whose ids and weights it gives, seen by running it.
"""

from __future__ import annotations

from typing import Any

import moe_runner
from moe_runner import RouterForm

_EXPERTS, _TOP_K, _GROUPS, _CHOSEN = 16, 3, 4, 2
_TOKENS = 64


def moe_routers() -> tuple[str, ...]:
    """Names, sorted, as `moe_runner.RouterForm.name` gives them."""
    return tuple(sorted(form.name for form in moe_runner.probes(_GROUPS, _CHOSEN) if _gives(form)))


def _gives(form: RouterForm) -> bool:
    import torch
    from vllm.model_executor.layers.fused_moe.router.router_factory import create_fused_moe_router
    from vllm.platforms import current_platform

    device = current_platform.device_type
    generator = torch.Generator("cpu").manual_seed(0)
    # In an engine that starts, the type and the device that tensors have by default are the model's.
    numbers: dict[str, Any] = {"generator": generator, "dtype": torch.float32, "device": "cpu"}
    logits = torch.randn((_TOKENS, _EXPERTS), **numbers).mul(2).to(device)
    arguments = moe_runner.engine_arguments(form)
    correction = None
    if form.biased:  # some positive, most negative
        correction = torch.rand(_EXPERTS, **numbers).mul(2).sub(1.5).to(device)
        arguments["e_score_correction_bias"] = correction
    try:
        router = create_fused_moe_router(top_k=_TOP_K, global_num_experts=_EXPERTS, **arguments)
        weights, ids = router.select_experts(logits, logits, topk_indices_dtype=None)
    except Exception:  # asserted, not implemented, or no kernel: it does not have the form
        return False
    wanted, chosen = moe_runner.route(form, logits, correction, _TOP_K)
    nothing = torch.zeros_like(logits)
    found = nothing.scatter_add(1, ids.to(torch.int64), weights.to(torch.float32))
    return torch.allclose(found, nothing.scatter_add(1, chosen, wanted), rtol=1e-4, atol=1e-6)
