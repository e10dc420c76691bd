"""Trace any nn.Module leaf-wise with exact source spans and match declarative patterns in torch.fx graphs."""

from fx_match._activation import ACTIVATIONS, activation, function_activation, module_activation
from fx_match._arguments import NoSuchArgument, argument, arguments
from fx_match._canonical import CASTS, COMMUTATIVE, VIEWS, canonical, cast_dtype, is_inplace
from fx_match._errors import FxMatchError, PatternError, TraceInputError
from fx_match._explain import explain
from fx_match._facts import MISSING, UNKNOWN, Guard, LeafCall, Missing, Stop, Unknown
from fx_match._find import Match, Miss, find, find_all, match_at
from fx_match._nodes import act, attr, call, linear, module, op, param, placeholder
from fx_match._pattern import Pattern, any_value, capture, const, opt, scalar, transparent
from fx_match._source import Location, SourceSpan
from fx_match._spellings import reciprocal, rsqrt, silu, sqrt, square, times_rsqrt
from fx_match._subject import Subject
from fx_match._tracing import Trace, trace
from fx_match._whole import Absent, absent, together, whole

__all__ = [
    "ACTIVATIONS",
    "CASTS",
    "COMMUTATIVE",
    "MISSING",
    "UNKNOWN",
    "VIEWS",
    "Absent",
    "FxMatchError",
    "Guard",
    "LeafCall",
    "Location",
    "Match",
    "Miss",
    "Missing",
    "NoSuchArgument",
    "Pattern",
    "PatternError",
    "SourceSpan",
    "Stop",
    "Subject",
    "Trace",
    "TraceInputError",
    "Unknown",
    "absent",
    "act",
    "activation",
    "any_value",
    "argument",
    "arguments",
    "attr",
    "call",
    "canonical",
    "capture",
    "cast_dtype",
    "const",
    "explain",
    "find",
    "find_all",
    "function_activation",
    "is_inplace",
    "linear",
    "match_at",
    "module",
    "module_activation",
    "op",
    "opt",
    "param",
    "placeholder",
    "reciprocal",
    "rsqrt",
    "scalar",
    "silu",
    "sqrt",
    "square",
    "times_rsqrt",
    "together",
    "trace",
    "transparent",
    "whole",
]
