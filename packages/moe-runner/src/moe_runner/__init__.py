"""Recognise a sparse mixture-of-experts block from its structure and dataflow, read what its experts compute, run them in vLLM's runner.

Recognising and reading know torch alone. vLLM is imported when a layer is built (`build_experts`), and not before.
"""

from moe_runner._activations import ACTIVATIONS, EngineActivation, asked_of_engine, engine_activation, names_of
from moe_runner._arguments import is_routed_call, is_rows_call
from moe_runner._block import SparseBlock
from moe_runner._engine_router import engine_arguments, probes, why_not_engine
from moe_runner._errors import ModuleTypeError, MoeRunnerError, NotRunnable
from moe_runner._listed import ReadBlock, read_block
from moe_runner._loading import LOADER, parameter_of
from moe_runner._passing import experts_passed_by
from moe_runner._reading import Experts, read_experts
from moe_runner._recognize import recognize
from moe_runner._router_forms import route
from moe_runner._router_reading import Router, read_router
from moe_runner._router_site import RouterSite, find_router
from moe_runner._rows import RowsGiven, read_rows
from moe_runner.balance import left_behind
from moe_runner.layer import RoutedExperts, build_experts
from moe_runner.router_layer import RouterLogits, build_router, gate_parameters
from moe_runner.routers import Place, RouterForm, RouterSpec, Routing
from moe_runner.shared_layer import SharedExperts, build_shared
from moe_runner.shared_site import SharedSite, find_shared
from moe_runner.specs import AnyExpertsSpec, ExpertsSpec, ExpertTensor, Gate, SharedSpec, WrittenExpertsSpec
from moe_runner.written import WRITTEN, WrittenExperts, keep_experts

__all__ = [
    "ACTIVATIONS",
    "LOADER",
    "WRITTEN",
    "AnyExpertsSpec",
    "EngineActivation",
    "ExpertTensor",
    "Experts",
    "ExpertsSpec",
    "Gate",
    "ModuleTypeError",
    "MoeRunnerError",
    "NotRunnable",
    "Place",
    "ReadBlock",
    "RoutedExperts",
    "Router",
    "RouterForm",
    "RouterLogits",
    "RouterSite",
    "RouterSpec",
    "Routing",
    "RowsGiven",
    "SharedExperts",
    "SharedSite",
    "SharedSpec",
    "SparseBlock",
    "WrittenExperts",
    "WrittenExpertsSpec",
    "asked_of_engine",
    "build_experts",
    "build_router",
    "build_shared",
    "engine_activation",
    "engine_arguments",
    "experts_passed_by",
    "find_router",
    "find_shared",
    "gate_parameters",
    "is_routed_call",
    "is_rows_call",
    "keep_experts",
    "left_behind",
    "names_of",
    "parameter_of",
    "probes",
    "read_block",
    "read_experts",
    "read_router",
    "read_rows",
    "recognize",
    "route",
    "why_not_engine",
]
