"""Shared by the tests that start the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tf_tools.compare import compare_run
from tf_tools.engine import TENSOR_PARALLEL_2, ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts


@pytest.fixture
def assert_equal_on_two_ranks() -> Callable[..., None]:
    """`assert_equal_on_two_ranks(folder, eager=True, **options)`: two processes, in chunks, give what transformers does."""

    def check(folder: Path, *, eager: bool = True, **options: Any) -> None:
        result = serve(
            ServeRequest(
                folder,
                prompts=probe_prompts(384),
                enforce_eager=eager,
                runs=1,
                llm_kwargs={"max_num_batched_tokens": 32, **options},
                environment=TENSOR_PARALLEL_2,
                timeout=600.0,
            )
        ).require()
        assert len(result.served_by) == 2
        assert all(name.startswith("tf_backend.model.served.Transformers") for name in result.served_by)
        for run in result.runs:
            report = compare_run(reference_for(folder, run), run)
            assert report.ok, str(report)

    return check
