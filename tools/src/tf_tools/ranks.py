"""Several ranks without an engine: forked processes with vLLM's groups over gloo, and stand-ins for what its CPU build lacks.

    first, second = on_ranks(function, tensor=2, enable_expert_parallel=True)        # what `function()` gives on each rank
    with stand_ins(): ...                                                            # in a rank, before layers are built

vLLM's kernels for experts, its exchange of tokens between data-parallel ranks and its map of logical to physical experts exist on CUDA
alone. The stand-ins do what those are documented to do, in a few lines of torch, so that all of vLLM that lies around them runs.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tf_tools.engine import warm
from tf_tools.fork import run_in_fork

__all__ = ["on_ranks", "stand_ins"]


def on_ranks(
    function: Callable[..., Any], *args: Any, tensor: int = 1, data: int = 1, redundant: int = 0, **parallel: Any
) -> list[Any]:
    """What `function(*args)` gives on each rank, in order of ranks: those of one data-parallel replica follow one another.

    `parallel` is laid over vLLM's parallel config, unchecked: some of it vLLM's config refuses on a CPU.
    """
    warm()
    options = {"tensor_parallel_size": tensor, "data_parallel_size": data, **parallel}
    found = run_in_fork(_all, 120.0, tensor * data, options, redundant, function, args).value()
    assert isinstance(found, list)
    return found


def _all(ranks: int, options: dict[str, Any], redundant: int, function: Callable[..., Any], args: Any) -> list[Any]:
    """Fork the other ranks, and be the first."""
    children = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["VLLM_DIST_IDENT"] = os.path.basename(folder)  # of their shared memory
        os.environ["OMP_NUM_THREADS"] = "1"
        for rank in range(1, ranks):
            if child := os.fork():
                children.append(child)
                continue
            try:
                found = _one(rank, ranks, options, redundant, folder, function, args)
                Path(folder, f"found{rank}").write_bytes(pickle.dumps(found))
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
                os.killpg(0, signal.SIGKILL)  # the first would wait for it; `run_in_fork` made the group
            os._exit(0)
        first = _one(0, ranks, options, redundant, folder, function, args)
        for child in children:
            os.waitpid(child, 0)
        return [first, *(pickle.loads(Path(folder, f"found{rank}").read_bytes()) for rank in range(1, ranks))]


def _one(
    rank: int,
    ranks: int,
    options: dict[str, Any],
    redundant: int,
    folder: str,
    function: Callable[..., Any],
    args: Any,
) -> Any:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel

    config = VllmConfig()
    parallel = config.parallel_config
    for name, value in options.items():
        setattr(parallel, name, value)
    parallel.data_parallel_rank = rank // parallel.tensor_parallel_size
    parallel.distributed_executor_backend = "external_launcher"  # ranks are counted over all replicas
    parallel.eplb_config.num_redundant_experts = redundant
    parallel.eplb_config.communicator = "torch_gloo"
    parallel.eplb_config.use_async = False
    with set_current_vllm_config(config), torch.no_grad():
        init_distributed_environment(ranks, rank, f"file://{folder}/rendezvous", rank, "gloo")
        initialize_model_parallel(parallel.tensor_parallel_size)
        return function(*args)


@contextmanager
def stand_ins() -> Iterator[None]:
    """Kernels that look at the map of experts, an exchange of tokens, and ids of physical experts, within vLLM's own layers."""
    from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
    from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    from vllm.model_executor.layers.fused_moe.router import base_router

    with ExitStack() as stack:
        for owner, name, function in (
            (CPUUnquantizedExperts, "apply", _experts),
            (CPUUnquantizedExperts, "process_weights_after_loading", lambda self, layer: None),
            (CpuCommunicator, "all_gatherv", _gather),
            (CpuCommunicator, "reduce_scatterv", _scatter),
            (torch, "Event", _Event),
            (torch.accelerator, "current_stream", _Event),
            (base_router, "eplb_map_to_physical_and_record", _to_physical),
        ):
            stack.enter_context(mock.patch.object(owner, name, function, create=True))
        yield


class _Event:
    """Of an accelerator that there is not."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: _Event) -> float:
        return 0.0


def _experts(self: Any, output: Tensor, hidden_states: Tensor, w1: Tensor, w2: Tensor, **options: Any) -> None:
    """Experts of this rank alone: `expert_map` says which they are, and where."""
    weights, places = options["topk_weights"], options["topk_ids"].to(torch.int64)
    if options["expert_map"] is not None:
        places = options["expert_map"][places].to(torch.int64)
    here, places = places >= 0, places.clamp(min=0)
    inner = torch.einsum("th,tkoh->tko", hidden_states, w1[places])
    if self.w1_bias is not None:
        inner = inner + self.w1_bias[places]
    if options["activation"].value == "swigluoai":  # rows alternate
        gate, up = inner[..., 0::2].clamp(max=7.0), inner[..., 1::2].clamp(-7.0, 7.0)
        inner = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    else:
        gate, up = inner.chunk(2, dim=-1)
        inner = torch.nn.functional.silu(gate) * up
    out = torch.einsum("tkm,tkhm->tkh", inner, w2[places])
    if self.w2_bias is not None:
        out = out + self.w2_bias[places]
    output.copy_((out * (weights * here)[..., None]).sum(dim=1))


def _gather(self: Any, given: Any, dim: int = 0, sizes: list[int] | None = None) -> Any:
    """Rows of all ranks, of which there are `sizes`."""
    if isinstance(given, list):
        return [_gather(self, one, dim, sizes) for one in given]
    assert dim == 0
    parts = [given.new_empty((size, *given.shape[1:])) for size in sizes or [given.shape[0]] * self.world_size]
    longest = max(part.shape[0] for part in parts)
    padded = [given.new_zeros((longest, *given.shape[1:])) for _ in parts]
    mine = given.new_zeros((longest, *given.shape[1:]))
    mine[: given.shape[0]] = given
    torch.distributed.all_gather(padded, mine, group=self.device_group)
    return torch.cat([one[: part.shape[0]] for one, part in zip(padded, parts, strict=True)])


def _scatter(self: Any, given: Tensor, dim: int = 0, sizes: list[int] | None = None) -> Tensor:
    """Sums over ranks, of which each gets its own rows."""
    total = given.clone()
    torch.distributed.all_reduce(total, group=self.device_group)
    sizes = sizes or [given.shape[0] // self.world_size] * self.world_size
    mine: Tensor = torch.split(total, sizes)[self.rank_in_group]
    return mine


def _to_physical(
    topk_ids: Tensor,
    expert_load_view: Tensor,
    logical_to_physical_map: Tensor,
    logical_replica_count: Tensor,
    record_enabled: Tensor,
    num_unpadded_tokens: Tensor | None = None,
) -> Tensor:
    """Any copy of each expert, here by turns; counts what each physical expert gets."""
    ids = topk_ids.to(torch.int64)
    turn = torch.arange(ids.shape[0])[:, None] % logical_replica_count[ids]
    physical = logical_to_physical_map[ids, turn]
    if record_enabled:
        counted = physical if num_unpadded_tokens is None else physical[: int(num_unpadded_tokens)]
        expert_load_view += torch.bincount(counted.flatten(), minlength=len(expert_load_view)).to(torch.int32)
    return physical.to(topk_ids.dtype)
