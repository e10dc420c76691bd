"""Names under which vLLM knows its transformers backend, and which of them this package serves.

vLLM chooses one of these by the kind of model and compares class names with them later, so the classes keep the names.
"""

from __future__ import annotations

SERVED: tuple[str, ...] = ("TransformersForCausalLM", "TransformersMoEForCausalLM")
"""Classes that plan the model and serve it, or refuse it with the reasons that the plan found."""

REFUSED: dict[str, str] = {
    "TransformersForMTP": "multi-token prediction draft models",
    "TransformersMoEForMTP": "multi-token prediction draft models",
    "TransformersMultiModalForCausalLM": "multimodal models",
    "TransformersMultiModalMoEForCausalLM": "multimodal models",
    "TransformersEmbeddingModel": "pooling models (embedding)",
    "TransformersMoEEmbeddingModel": "pooling models (embedding)",
    "TransformersMultiModalEmbeddingModel": "multimodal pooling models",
    "TransformersForSequenceClassification": "pooling models (classification)",
    "TransformersMoEForSequenceClassification": "pooling models (classification)",
    "TransformersMultiModalForSequenceClassification": "multimodal pooling models",
}
"""Classes that refuse by name, and what they would be."""
