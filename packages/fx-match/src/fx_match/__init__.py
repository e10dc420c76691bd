"""Trace any nn.Module leaf-wise with exact source spans and match declarative patterns in torch.fx graphs."""
