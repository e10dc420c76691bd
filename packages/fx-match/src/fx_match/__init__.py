"""Trace any nn.Module leaf-wise with exact source spans and match declarative patterns in torch.fx graphs."""

from fx_match._errors import FxMatchError, PatternError, TraceInputError
from fx_match._facts import MISSING, UNKNOWN, Guard, LeafCall, Missing, Stop, Unknown
from fx_match._source import Location, SourceSpan
from fx_match._tracing import Trace, trace

__all__ = [
    "MISSING",
    "UNKNOWN",
    "FxMatchError",
    "Guard",
    "LeafCall",
    "Location",
    "Missing",
    "PatternError",
    "SourceSpan",
    "Stop",
    "Trace",
    "TraceInputError",
    "Unknown",
    "trace",
]
