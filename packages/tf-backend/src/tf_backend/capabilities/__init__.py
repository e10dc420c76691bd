"""What an engine and its platform can do, as data that planning reads: recorded once per vLLM build and platform.

In: an installed vLLM, or a data file. Out: `Capabilities`. vLLM is imported by `record` and `check` alone.
"""

from tf_backend.capabilities._check import check
from tf_backend.capabilities._installed import Distribution, installed
from tf_backend.capabilities._record import record
from tf_backend.capabilities._schema import Capabilities
from tf_backend.capabilities._shipped import default, load, shipped, shipped_names

__all__ = [
    "Capabilities",
    "Distribution",
    "check",
    "default",
    "installed",
    "load",
    "record",
    "shipped",
    "shipped_names",
]
