"""Which sizes of latent attention (MLA) the engine takes.

In: vLLM's latent backend and, on a CPU, its decode kernel. Out: pairs (kv_lora_rank, rope dimension).
"""

from __future__ import annotations

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
