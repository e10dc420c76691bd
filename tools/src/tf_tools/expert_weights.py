"""Weights for a layer of experts that stands alone, as a checkpoint's loader gives them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moe_runner import LOADER, ExpertsSpec, parameter_of
from moe_runner.layer import RoutedExperts
from torch import Tensor


def fill_experts(layer: RoutedExperts, spec: ExpertsSpec, values: Mapping[str, Tensor]) -> None:
    """Load `values`, by the names of the spec's tensors and as transformers shapes them, into `layer`, and make it ready to run."""
    parameters = dict(layer.named_parameters())
    for tensor in spec.tensors:
        parameter = parameters[parameter_of(tensor)]
        getattr(parameter, LOADER)(parameter, values[tensor.name], tensor)
    routed: Any = layer.runner.routed_experts
    routed.quant_method.process_weights_after_loading(routed)
