"""Recognise a sparse mixture-of-experts block from its structure and dataflow, and say what it computes."""

from moe_runner._block import SparseBlock
from moe_runner._errors import ModuleTypeError, MoeRunnerError
from moe_runner._recognize import recognize

__all__ = ["ModuleTypeError", "MoeRunnerError", "SparseBlock", "recognize"]
