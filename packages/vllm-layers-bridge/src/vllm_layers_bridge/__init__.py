"""What a PyTorch layer becomes in vLLM: fusions, linear and norm layers, attention seam."""
