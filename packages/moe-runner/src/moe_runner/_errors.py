"""Exceptions. What a module does never raises: it makes `recognize` give None, or say what is not known."""


class MoeRunnerError(Exception):
    """Base of every error of moe-runner."""


class ModuleTypeError(MoeRunnerError, TypeError):
    """`recognize` was called with something that is no `nn.Module`."""


class NotRunnable(MoeRunnerError):
    """Experts that the installed vLLM's runner cannot take; the message names the layer, its sizes and the reason."""
