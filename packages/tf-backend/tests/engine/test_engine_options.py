"""Options of the engine that touch the weights or the cache: each does what it says, or is refused by name at the start."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tf_tools.checkpoints import make_checkpoint
from tf_tools.compare import compare_run
from tf_tools.engine import ServeRequest, serve
from tf_tools.reference import reference_for
from tf_tools.sensitivity import probe_prompts

pytestmark = pytest.mark.engine


def test_other_weights_of_a_tied_model_are_loaded_into_a_running_engine(
    checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    other = make_checkpoint("llama-tied", tmp_path / "other", seed=1, max_shard_size="100KB", drop_base_prefix=True)

    def reload(llm: Any) -> None:
        llm.generate({"prompt_token_ids": [5, 6, 7]}, use_tqdm=False)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        llm.reset_prefix_cache()

    request = ServeRequest(checkpoint("llama-tied"), prompts=probe_prompts(384), runs=1, before=reload)
    result = serve(request).require()
    assert any(hit > 0 for hit in result.cached_tokens), "the last run reads the prefix cache"
    for run in result.runs:
        report = compare_run(reference_for(other, run), run)
        assert report.ok, str(report)
