"""Serve a Hugging Face transformers model in vLLM from its own model definition, at native speed."""
