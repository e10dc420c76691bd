"""Whether the engine at hand is the one that a plan was made for.

In: the plan's capabilities. Out: nothing, or `CapabilityMismatch` that names the fields.
"""

from __future__ import annotations

from tf_backend.capabilities._record import record
from tf_backend.capabilities._schema import Capabilities
from tf_backend.errors import CapabilityMismatch


def check(capabilities: Capabilities) -> None:
    """Compare with the installed engine, every field but `name`.

    Raises `CapabilityMismatch` when any differs, `EngineMissing` when there is no engine.
    """
    met = record()
    differences = capabilities.differences(met)
    if differences:
        raise CapabilityMismatch(capabilities.name, met.name, differences)
