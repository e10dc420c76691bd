"""``tf-backend inspect``: plan a model from its configuration, and show the plan."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys

from tf_backend import capabilities
from tf_backend.cli._console import make_console
from tf_backend.cli._model import model_folder

_SERVED, _REFUSED = 0, 2


def run(options: argparse.Namespace) -> int:
    """Print the plan. Returns 2 when the model is refused."""
    # What transformers logs about kernels that it lacks is of no concern to a plan.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    # Whatever libraries print while a model is planned must not end up in the JSON.
    with contextlib.redirect_stdout(sys.stderr):
        folder = model_folder(options.model, trust_remote_code=options.trust_remote_code)
        engine = capabilities.default() if options.capabilities is None else capabilities.load(options.capabilities)
        from tf_backend.plan import plan_folder
        from tf_backend.plan.schema import Parallel

        plan = plan_folder(
            folder,
            parallel=Parallel(
                options.tensor_parallel_size,
                options.pipeline_parallel_size,
                options.enable_expert_parallel,
                options.data_parallel_size,
            ),
            capabilities=engine,
            trust_remote_code=options.trust_remote_code,
        )
    if options.json:
        sys.stdout.write(plan.to_json().decode() + "\n")
    else:
        from tf_backend.cli._render import render_diffs, render_plan

        console = make_console()
        render_plan(console, plan)
        if options.diff:
            render_diffs(console, plan)
    return _SERVED if plan.is_served else _REFUSED
