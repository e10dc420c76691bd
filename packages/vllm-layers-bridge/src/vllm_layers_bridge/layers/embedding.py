"""Token embeddings and the head's projection onto the vocabulary.

In: an embedding or head spec. Out: vLLM's vocabulary-parallel layers, rows padded to a multiple of 64 and split over ranks.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from vllm_layers_bridge.specs import EmbeddingSpec, HeadLinearSpec


def build_embedding(spec: EmbeddingSpec, prefix: str, quant_config: Any) -> nn.Module:
    """A lookup table of [num_embeddings, embedding_dim]."""
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer: nn.Module = VocabParallelEmbedding(
        spec.num_embeddings, spec.embedding_dim, quant_config=quant_config, prefix=prefix
    )
    return layer


def build_head(spec: HeadLinearSpec, prefix: str, quant_config: Any) -> nn.Module:
    """The head's weight; it is applied by a logits processor, not called."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    layer: nn.Module = ParallelLMHead(
        spec.num_embeddings, spec.embedding_dim, bias=spec.bias, quant_config=quant_config, prefix=prefix
    )
    return layer
