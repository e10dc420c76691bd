"""``tf-backend serve``: what ``vllm serve`` does, on every build of vLLM, after the model has been planned and its files checked.

In: the options of ``vllm serve``. Out: 0 when SIGTERM ended the server; the command's other statuses for what is refused before it starts.
"""

from __future__ import annotations

import argparse
import logging
import signal
from types import FrameType

from tf_backend import capabilities
from tf_backend.cli._held_logs import held_logs
from tf_backend.cli._present import EngineFailed
from tf_backend.errors import EngineMissing, TfBackendError

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(BaseException):
    """A signal before the server runs. No `KeyboardInterrupt`: vLLM takes that for nothing while it waits for its engine, and waits on."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes. Raises `KeyboardInterrupt` for Ctrl-C, and errors for all that goes wrong."""
    distribution = capabilities.installed()
    if distribution is None:
        raise EngineMissing("serving a model")
    before = {number: signal.signal(number, _stop) for number in _SIGNALS}
    try:
        received = _serve(options.arguments, distribution.name, options.debug)
    except Stopped as stopped:
        received = [stopped.number]
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if signal.SIGINT in received:
        raise KeyboardInterrupt
    return 0


def _stop(number: int, frame: FrameType | None) -> None:
    raise Stopped(number)


def _serve(given: list[str], distribution: str, is_debugged: bool) -> list[int]:
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # what libraries say of a machine without a GPU, or without Triton
    try:
        from tf_backend.cli._serve_options import parse
        from tf_backend.cli._serve_preflight import preflight
        from tf_backend.cli._serve_server import serve
    except ImportError as error:
        raise EngineFailed("being imported", error, advice="Is its installation whole?") from error
    finally:
        logging.disable(disabled)
    with held_logs(shown=is_debugged):
        arguments = parse(given, distribution)
        preflight(arguments)
    try:
        return serve(arguments)
    except TfBackendError:
        raise
    except Exception as error:
        raise EngineFailed("serving", error, advice="The log above may say more.") from error
