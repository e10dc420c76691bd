"""Plan a model: pure analysis on the meta device, with its result as data.

plan = tf_backend.plan.plan_folder("path/to/model")
plan.is_served, plan.summary(), plan.to_json()
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from tf_backend.plan.schema import Parallel, Plan, Refusal

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from tf_backend.capabilities import Capabilities

__all__ = ["Parallel", "Plan", "Refusal", "plan", "plan_folder"]


def plan(model: PreTrainedModel, parallel: Parallel | None = None, capabilities: Capabilities | None = None) -> Plan:
    """Plan a head model on the meta device; see `tf_backend.model.skeleton.skeleton` for making one."""
    from tf_backend import capabilities as known
    from tf_backend.plan.planner import make_plan

    return make_plan(model, parallel or Parallel(), capabilities or known.default()).plan


def plan_folder(
    folder: str | Path,
    *,
    parallel: Parallel | None = None,
    capabilities: Capabilities | None = None,
    trust_remote_code: bool = False,
) -> Plan:
    """Plan the model whose `config.json` lies in `folder`; no weights are needed.

    Raises:
        ConfigError: there is no config, it names a type or architecture that transformers does not have, or no model can be made of it.
    """
    from tf_backend.model.config import read_config
    from tf_backend.model.remote_code import TrustedCode
    from tf_backend.model.skeleton import skeleton
    from tf_backend.plan.sizes_to_blame import blame_sizes

    config = read_config(folder, trust_remote_code=trust_remote_code)
    code = TrustedCode(str(folder)) if trust_remote_code else None
    model = skeleton(config, code=code)
    found = plan(model, parallel, capabilities)
    refusals = blame_sizes(model, found.refusals, lambda other: plan(other, parallel, capabilities).refusals)
    return msgspec.structs.replace(found, refusals=refusals)
