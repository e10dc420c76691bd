"""What this package raises."""

from __future__ import annotations


class BridgeError(Exception):
    """Base of all errors of this package."""


class NotBuildable(BridgeError):
    """A layer that the installed vLLM cannot express; the message names the layer, its sizes and the reason."""


class NotFusable(BridgeError):
    """A fusion whose pattern matched an instance on which it would not be right; the message is the reason."""


class WrongLayout(BridgeError):
    """Tensors at a seam that are not laid out as the engine takes them; the message gives both layouts."""
