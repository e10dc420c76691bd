"""Ask the installed engine what it can do.

In: an installed vLLM. Out: `Capabilities`. Nothing is typed here that the engine can be asked:

======================  ===============================================================================================
attention_backend       the platform's own selection (`get_attn_backend_cls`), which raises where no backend is valid
attention_head_sizes    each size up to 1024 is put to that selection, then to the selected backend
attention_dtypes        likewise, each floating dtype
kv_cache_dtypes         the backend's `supports_kv_cache_dtype`, for every value of vLLM's option
sliding window          the backend's `supports_sliding_window`
logits soft cap, alibi  the implementation's constructor takes it and, on a CPU, so does the compiled kernel
sinks                   the backend says so or, on a CPU, where it says nothing, constructor and kernel take them
gated_activations       the layer that vLLM gives for the name is run and compared with activation times product
mla_sizes               on a CPU the latent decode kernel is run for each split of the size that its backend states
mla_types               each word in vLLM's reading of a config that tells by type, put to that reading
moe_activations         the engine's own selection of a kernel for unquantized experts, which raises where no kernel is valid
moe_size_multiple       the smallest power of two for which that selection finds one
moe_routers             the router that vLLM makes for each form is run and compared with what the form says
moe_maps_experts        every platform's but the CPU's, whose kernels take a map and do not look at it
moe_exchanges_tokens    the platform's communicator has the gather and the scatter of uneven parts, which vLLM's base leaves out
======================  ===============================================================================================
"""

from __future__ import annotations

import functools
import inspect
from typing import Any, Literal

from tf_backend.capabilities._installed import require
from tf_backend.capabilities._schema import Capabilities
from tf_backend.errors import OptionRefused

_LARGEST_HEAD = 1024


@functools.cache
def record() -> Capabilities:
    """The capabilities of the installed engine; asked once per process. Imports vLLM, which takes seconds.

    Raises `EngineMissing` without vLLM, `OptionRefused` on a platform that is neither CPU nor CUDA.
    """
    distribution = require("recording capabilities")
    from vllm.platforms import current_platform

    platform: Literal["cpu", "cuda"]
    if current_platform.is_cpu():
        platform = "cpu"
    elif current_platform.is_cuda():
        platform = "cuda"
    else:
        raise OptionRefused(
            f"vLLM runs on platform {current_platform.device_type!r} here; tf-backend knows cpu and cuda. Install the "
            "build of vLLM for one of them."
        )

    from tf_backend.capabilities._activations import gated_activations
    from tf_backend.capabilities._experts import moe_activations, moe_exchanges_tokens, moe_size_multiple
    from tf_backend.capabilities._latent import latent_sizes, latent_types
    from tf_backend.capabilities._routers import moe_routers

    backend = _select(64, "bfloat16")
    if backend is None:
        raise OptionRefused(
            "vLLM selects no attention backend on this machine for head size 64 in bfloat16; nothing can be served. "
            "Check that the build of vLLM belongs to this accelerator."
        )
    sizes = tuple(size for size in range(1, _LARGEST_HEAD + 1) if _select(size, "bfloat16") is not None)
    dtypes = tuple(name for name in ("bfloat16", "float16", "float32") if _select(64, name) is not None)
    return Capabilities(
        name=f"{distribution.name} {distribution.version} {platform}",
        distribution=distribution.name,
        vllm_version=distribution.version,
        platform=platform,
        attention_backend=str(backend.get_name()),
        attention_head_sizes=sizes,
        attention_dtypes=dtypes,
        kv_cache_dtypes=_kv_cache_dtypes(backend),
        supports_sliding_window=bool(backend.supports_sliding_window()),
        supports_logits_soft_cap=_takes(backend, platform, argument="logits_soft_cap", kernel_argument="softcap"),
        supports_sinks=_supports_sinks(backend, platform),
        supports_alibi=_takes(backend, platform, argument="alibi_slopes", kernel_argument="alibi_slopes"),
        gated_activations=gated_activations(),
        mla_sizes=latent_sizes(platform),
        mla_types=latent_types(),
        moe_activations=moe_activations(),
        moe_size_multiple=moe_size_multiple(),
        moe_routers=moe_routers(),
        moe_maps_experts=platform != "cpu",
        moe_exchanges_tokens=moe_exchanges_tokens(),
    )


def _select(head_size: int, dtype: str, *, has_sink: bool = False) -> Any:
    """The backend class that the platform selects, or None when there is none for this head size and dtype."""
    import torch
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = AttentionSelectorConfig(
        head_size=head_size, dtype=getattr(torch, dtype), kv_cache_dtype="auto", block_size=None, has_sink=has_sink
    )
    try:
        path = current_platform.get_attn_backend_cls(None, asked)
    except (ValueError, NotImplementedError):
        return None
    backend = resolve_obj_by_qualname(path)
    if not backend.supports_head_size(head_size) or not backend.supports_dtype(asked.dtype):
        return None
    return backend


def _kv_cache_dtypes(backend: Any) -> tuple[str, ...]:
    from typing import get_args

    from vllm.config.cache import CacheDType

    return tuple(sorted(name for name in get_args(CacheDType) if backend.supports_kv_cache_dtype(name)))


def _takes(backend: Any, platform: str, *, argument: str, kernel_argument: str) -> bool:
    """Whether constructor and, on a CPU, kernel take the argument. The platform selects no backend by these features."""
    if argument not in inspect.signature(backend.get_impl_cls().__init__).parameters:
        return False
    return platform != "cpu" or kernel_argument in _cpu_kernel_arguments()


def _supports_sinks(backend: Any, platform: str) -> bool:
    chosen = _select(64, "bfloat16", has_sink=True)
    if chosen is None:
        return False
    # The CPU platform looks at no feature when it selects, and its backend declares none.
    undeclared = platform == "cpu" and _takes(backend, platform, argument="sinks", kernel_argument="s_aux")
    return bool(chosen.supports_sink()) or undeclared


def _cpu_kernel_arguments() -> frozenset[str]:
    import torch

    schema = torch.ops._C.cpu_attention_with_kv_cache.default._schema
    return frozenset(argument.name for argument in schema.arguments)
