"""What latent attention the engine takes as it is configured: the platform's selection, asked with the engine's types and options.

In: the engine's config, the capabilities. Out: a `LatentCache` for planning. Attention that is not served latent is served expanded, and
the plan says why.
"""

from __future__ import annotations

from typing import Any

from tf_backend.capabilities import Capabilities
from tf_backend.errors import OptionRefused
from tf_backend.plan.latent import NOT_OF_TYPE, LatentCache
from tf_backend.plan.schema import Plan

_CUDA_SIZES = ((512, 64),)
"""vLLM's CUDA backends state the sum, 576; this is the split that their kernels are compiled for."""


def latent_cache(vllm_config: Any, known: Capabilities) -> LatentCache:
    """Sizes that this engine takes."""
    sizes = known.mla_sizes or (_CUDA_SIZES if known.platform == "cuda" else ())
    if not sizes:
        return LatentCache.of(known, vllm_config.model_config.hf_text_config.model_type)
    if not vllm_config.model_config.use_mla:
        return LatentCache(sizes, "vLLM is told to use no latent attention (VLLM_MLA_DISABLE)")
    why = {size: _why_not(vllm_config, sum(size)) for size in sizes}
    taken = tuple(size for size in sizes if not why[size])
    return LatentCache(taken) if taken else LatentCache(sizes, next(iter(why.values())))


def check_expanded(vllm_config: Any, plan: Plan) -> None:
    """Raise `OptionRefused` where vLLM lays out its cache for latent attention, and attention that is served expanded cannot be kept in it.

    A CPU without AMX has blocks of 16 tokens then, whatever is asked for.
    """
    expanded = [attention.spec for attention in plan.attention if attention.latent is None]
    if not expanded or not vllm_config.model_config.use_mla:
        return
    block = vllm_config.cache_config.block_size
    backend = _backend(vllm_config, max(spec.cache_head_dim for spec in expanded), block, is_latent=False)
    if isinstance(backend, str) or backend.supports_block_size(block):
        return  # where there is none, building the layer says so
    reasons = "; ".join(dict.fromkeys(latent.reason for latent in plan.latent if latent.reason))
    chosen = vllm_config.attention_config.backend
    enough = (
        f" On a CPU with AMX it is enough to leave out `--attention-backend {chosen.name}`."
        if chosen is not None
        else ""
    )
    raise OptionRefused(
        f"this model's keys and values are cached expanded{f' ({reasons})' if reasons else ''}, and vLLM's cache has blocks of {block} "
        f"tokens here, which its kernels for latent attention want and {backend.get_name()} does not take. Set VLLM_MLA_DISABLE=1 in the "
        f"environment: the blocks are of another size then.{enough}"
    )


def _why_not(vllm_config: Any, head_size: int) -> str:
    """Why the backend that the platform selects does not take this size under these options; empty where it does."""
    if vllm_config.model_config.get_head_size() != head_size:
        return NOT_OF_TYPE
    cache = vllm_config.cache_config
    dtype = vllm_config.model_config.dtype
    block = cache.block_size if cache.user_specified_block_size else None
    backend = _backend(vllm_config, head_size, block, is_latent=True)
    if isinstance(backend, str):
        return f"vLLM selects no latent attention: {backend}"
    name = backend.get_name()
    if not backend.supports_head_size(head_size):
        return f"vLLM's {name} attention takes no {head_size} features"
    if not backend.supports_dtype(dtype):
        return f"vLLM's {name} attention does not take {str(dtype).removeprefix('torch.')}"
    if not backend.supports_kv_cache_dtype(cache.cache_dtype):
        return f"vLLM's {name} attention does not keep {cache.cache_dtype}"
    if block is not None and not backend.supports_block_size(block):
        return f"vLLM's {name} attention takes no blocks of {block} tokens"
    return ""


def _backend(vllm_config: Any, head_size: int, block: int | None, *, is_latent: bool) -> Any:
    """The backend class that the platform selects, or why it selects none."""
    from vllm.platforms import current_platform
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.attention.selector import AttentionSelectorConfig

    asked = AttentionSelectorConfig(
        head_size=head_size,
        dtype=vllm_config.model_config.dtype,
        kv_cache_dtype=vllm_config.cache_config.cache_dtype,
        block_size=block,
        use_mla=is_latent,
    )
    chosen = vllm_config.attention_config.backend if is_latent else None
    try:
        path = current_platform.get_attn_backend_cls(chosen, asked)
    except (ValueError, NotImplementedError) as error:
        return str(error)
    return resolve_obj_by_qualname(path)
