"""What can be wrong with a measurement before, between or after its processes."""

from __future__ import annotations


class BenchError(RuntimeError):
    """A measurement that cannot be made, continued or read. Text says what was found, what was expected, what to do."""
