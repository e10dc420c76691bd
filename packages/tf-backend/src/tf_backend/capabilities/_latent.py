"""Which sizes of latent attention (MLA) the engine takes, and of which types of models.

In: vLLM's latent backend and, on a CPU, its decode kernel. Out: pairs (kv_lora_rank, rope dimension). In: what vLLM reads a config
with. Out: values of `model_type`.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from types import SimpleNamespace

_STEP = 16
"""Ranks and rope dimensions are multiples of this, the block size that the CPU kernel is compiled for."""


def latent_sizes(platform: str) -> tuple[tuple[int, int], ...]:
    """Pairs that the kernel runs. Empty off the CPU: backends there state the sum of the two and nothing on the split."""
    if platform != "cpu":
        return ()
    from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend

    pairs = []
    for size in CPUMLABackend.get_supported_head_sizes():
        pairs += [(rank, size - rank) for rank in range(_STEP, size, _STEP) if _decodes(rank, size)]
    return tuple(pairs)


def _decodes(rank: int, size: int) -> bool:
    """Run one token through the decode kernel: it raises for sizes that it was not compiled for."""
    import torch
    from vllm import _custom_ops

    out = torch.empty(1, 1, rank, dtype=torch.bfloat16)
    query = torch.zeros(1, 1, size, dtype=torch.bfloat16)
    cache = torch.zeros(1, _STEP, size, dtype=torch.bfloat16)
    table = torch.zeros(1, 1, dtype=torch.int32)
    try:
        _custom_ops.mla_decode_kvcache_cpu(out, query, cache, 1.0, table, torch.ones(1, dtype=torch.int32))
    except RuntimeError:
        return False
    return True


def latent_types() -> tuple[str, ...]:
    """Types of models whose layers vLLM caches as latents; it tells by type. Each word that its answer is made of is asked for."""
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    answer = ast.parse(textwrap.dedent(inspect.getsource(ModelArchConfigConvertorBase.is_deepseek_mla)))
    words = {node.value for node in ast.walk(answer) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return tuple(sorted(word for word in words if _is_latent(word)))


def _is_latent(model_type: str) -> bool:
    from vllm.transformers_utils.model_arch_config_convertor import ModelArchConfigConvertorBase

    config = SimpleNamespace(model_type=model_type, kv_lora_rank=512)
    try:
        return bool(ModelArchConfigConvertorBase(config, config).is_deepseek_mla())
    except AttributeError:  # a type that is told by more than these fields
        return False
