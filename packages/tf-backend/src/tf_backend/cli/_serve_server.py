"""Run vLLM's server, and learn which signal ended it.

Imports vLLM. In: validated options. Out: the signals that were received.
"""

from __future__ import annotations

import argparse
import errno
import logging
from collections.abc import Callable
from typing import TypeVarTuple

import uvloop
from vllm import envs
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.entrypoints.launchers.api_server.entry import run_server_worker
from vllm.entrypoints.launchers.launcher import setup_server
from vllm.utils.system_utils import decorate_logs

from tf_backend.errors import OptionRefused, TfBackendError


class ServerStopped(TfBackendError):
    """The server ended although nobody asked it to."""

    def __str__(self) -> str:
        return "the server stopped by itself, since its engine died. The log above says why."


_Ts = TypeVarTuple("_Ts")


class _Loop(uvloop.Loop):
    """Notes each signal for which a handler was called: the server treats Ctrl-C and SIGTERM alike, a shell does not."""

    def __init__(self) -> None:
        super().__init__()
        self.received: list[int] = []

    def add_signal_handler(self, sig: int, callback: Callable[[*_Ts], object], *args: *_Ts) -> None:
        def noted() -> None:
            self.received.append(sig)
            callback(*args)

        super().add_signal_handler(sig, noted)


def serve(arguments: argparse.Namespace) -> list[int]:
    """Serve until a signal comes; the signals that came. With several API servers, or engines on several machines, it is not known which.

    Raises:
        OptionRefused: the address is taken or not this machine's.
        ServerStopped: there was no signal.
    """
    if not _is_single(arguments):
        ServeSubcommand.cmd(arguments)
        return []
    arguments.api_server_count = None
    loop = _Loop()
    # Stopping kills the engine, unless `--shutdown-timeout` gives it time; that it is dead then is no news.
    log = logging.getLogger("vllm.v1.engine.async_llm")
    log.addFilter(lambda record: not loop.received)
    try:
        uvloop.run(_run(arguments), loop_factory=lambda: loop)
    except OSError as error:
        if error.errno not in (errno.EADDRINUSE, errno.EADDRNOTAVAIL, errno.EACCES):
            raise
        address = arguments.uds or f"{arguments.host or ''}:{arguments.port}"
        raise OptionRefused(
            f"the server cannot listen on {address}: {error.strerror}. Give another `--host` or `--port`."
        ) from error
    if not loop.received:
        raise ServerStopped
    return loop.received


async def _run(arguments: argparse.Namespace) -> None:
    """The one API server, with the signal handlers that are there until it listens: vLLM's own would be ignored while its engine starts."""
    decorate_logs("APIServer", skip_if_decorated=True)
    address, listener = setup_server(arguments, reuse_port=False)
    await run_server_worker(address, listener, arguments)


def _is_single(arguments: argparse.Namespace) -> bool:
    """Whether ``vllm serve`` would run the one API server in this process."""
    return (
        not arguments.headless
        and not arguments.grpc
        and arguments.api_server_count in (None, 1)
        and arguments.data_parallel_size == 1
        and not arguments.data_parallel_multi_port_external_lb
        and not envs.VLLM_USE_RUST_FRONTEND
    )
