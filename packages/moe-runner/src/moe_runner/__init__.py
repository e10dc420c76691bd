"""Recognise a sparse mixture-of-experts block and run it through vLLM's fused runner."""
