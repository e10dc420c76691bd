"""The options of every command. What a command does is imported when it runs.

In: nothing. Out: an `argparse` parser whose result has `run`, a function from options to exit status.
"""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from tf_backend.errors import OptionRefused


class _Parser(argparse.ArgumentParser):
    """Raises instead of exiting with status 2, which here means that a model is refused."""

    keeps_arguments = False
    """Whether arguments are kept as they are, for another parser that is slow to import."""

    def error(self, message: str) -> NoReturn:
        raise OptionRefused(f"{message}. `{self.prog} --help` shows what can be given.")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """As argparse does, or all of them into `arguments`; `--debug` is ours wherever it stands."""
        if not self.keeps_arguments:
            return super().parse_known_args(args, namespace)
        kept = [argument for argument in args or () if argument != "--debug"]
        is_debugged = "--debug" in (args or ())
        return argparse.Namespace(arguments=kept, debug=is_debugged, run=self.get_default("run")), []


def build_parser() -> argparse.ArgumentParser:
    """The parser of ``tf-backend``. Its `parse_args` raises `OptionRefused` for anything that it does not know."""
    shared = _Parser(add_help=False)
    shared.add_argument("--debug", action="store_true", help="show the traceback of an error")
    parser = _Parser(
        prog="tf-backend",
        description="Serve a Hugging Face transformers model in vLLM from its own model definition.",
        epilog="exit status: 0 done, 1 error, 2 the model is refused",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action=_Version, help="versions of all that matters, and exit")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="command")
    _add_inspect(commands, shared)
    _add_serve(commands)
    _add_demo(commands, shared)
    _add_capabilities(commands, shared)
    _add_zoo(commands, shared)
    version = commands.add_parser("version", parents=[shared], help="versions of all that matters", allow_abbrev=False)
    version.set_defaults(run=_version)
    return parser


def _add_inspect(commands: argparse._SubParsersAction[_Parser], shared: _Parser) -> None:
    parser = commands.add_parser(
        "inspect",
        parents=[shared],
        allow_abbrev=False,
        help="what serving a model would do",
        description="Show what serving a model would do: from config.json alone, without weights, vLLM or a GPU.",
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a folder that holds config.json, or a name on the Hugging Face hub"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print the plan as JSON and nothing else")
    form.add_argument("--diff", action="store_true", help="also print the diff of each rewritten forward")
    parser.add_argument("--tensor-parallel-size", type=_positive, default=1, metavar="N", help="ranks to plan for (1)")
    parser.add_argument(
        "--pipeline-parallel-size", type=_positive, default=1, metavar="N", help="stages to plan for (1)"
    )
    parser.add_argument(
        "--data-parallel-size", type=_positive, default=1, metavar="N", help="replicas that share experts (1)"
    )
    parser.add_argument(
        "--enable-expert-parallel", action="store_true", help="whole experts on each rank, not parts of each"
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")
    parser.add_argument("--capabilities", metavar="FILE", help="plan for the engine recorded in FILE")
    parser.set_defaults(run=_inspect)


def _add_serve(commands: argparse._SubParsersAction[_Parser]) -> None:
    # The options, help included, are those of vLLM's parser.
    parser = commands.add_parser(
        "serve", help="serve a model: what `vllm serve` does, with all its options", add_help=False
    )
    parser.keeps_arguments = True
    parser.set_defaults(run=_serve)


def _add_demo(commands: argparse._SubParsersAction[_Parser], shared: _Parser) -> None:
    parser = commands.add_parser(
        "demo",
        parents=[shared],
        allow_abbrev=False,
        help="serve a small model here and now",
        description="Plan a model, start the engine in this process and stream completions. The first run converts the "
        "weights of SmolLM2-135M-Instruct, which takes half a minute.",
    )
    parser.add_argument("--model", metavar="DIR", help="a model folder of your own")
    parser.add_argument(
        "--prompt",
        action="extend",
        nargs="+",
        metavar="TEXT",
        help="a prompt, or several (three that come with the demo)",
    )
    parser.add_argument("--max-tokens", type=_positive, default=64, metavar="N", help="tokens per completion (64)")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--compile", action="store_true", dest="compiled", help="compile the model: a minute more on a CPU, then faster"
    )
    mode.add_argument("--eager", action="store_false", dest="compiled", help="do not compile (default)")
    parser.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float16", "float32"), default="auto", help="of weights"
    )
    parser.add_argument(
        "--model-impl",
        choices=("transformers", "vllm"),
        default="transformers",
        help="vllm: the engine's own definition of the model, to compare with",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code that the model brings")
    parser.add_argument("--verbose", action="store_true", help="show the engine's log")
    parser.set_defaults(run=_demo, compiled=False)


def _add_capabilities(commands: argparse._SubParsersAction[_Parser], shared: _Parser) -> None:
    parser = commands.add_parser(
        "capabilities",
        allow_abbrev=False,
        help="what the engine can do",
        description="What planning knows of the engine.",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True, dest="action")
    show = actions.add_parser(
        "show", parents=[shared], allow_abbrev=False, help="print those that planning uses here, or a shipped one"
    )
    show.add_argument("name", nargs="?", metavar="NAME", help="of one that comes with the package")
    show.set_defaults(run=_capabilities)
    record = actions.add_parser("record", parents=[shared], allow_abbrev=False, help="ask the installed engine")
    record.add_argument("--output", metavar="FILE", help="write there instead of standard output")
    record.set_defaults(run=_capabilities)


def _add_zoo(commands: argparse._SubParsersAction[_Parser], shared: _Parser) -> None:
    parser = commands.add_parser(
        "zoo",
        parents=[shared],
        allow_abbrev=False,
        help="what becomes of every model type of the installed transformers",
        description="Make a tiny model of each type, and find out what serving it would do. What is known already is not done "
        "again, unless versions or sources changed.",
        epilog="exit status 1 when numbers are wrong, looking at a type failed, or --check finds a difference",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="model types, or kind/type; wildcards of a shell (all)"
    )
    parser.add_argument(
        "--kind",
        action="append",
        metavar="KIND",
        help="causal, encoder, embedding, classification or image-text; may be repeated",
    )
    parser.add_argument(
        "--level",
        choices=("plan", "numbers", "serve"),
        default="plan",
        help="plan: on meta, without vLLM. numbers: each rewritten module against its original. serve: in the engine against "
        "transformers, in a checkout alone. Each includes those before it",
    )
    parser.add_argument("--results", metavar="FILE", help="where results are kept (in the user's cache folder)")
    parser.add_argument("--fresh", action="store_true", help="begin anew")
    parser.add_argument("--jobs", type=_positive, metavar="N", help="side by side (number of cores)")
    parser.add_argument("--timeout", type=_positive, metavar="SECONDS", help="for one type at one level")
    parser.add_argument("--capabilities", metavar="FILE", help="plan for the engine recorded in FILE (the CPU build)")
    parser.add_argument("--json", action="store_true", help="print JSON and nothing else")
    parser.add_argument("--csv", metavar="FILE", help="also write a table")
    parser.add_argument("--html", metavar="FILE", help="also write one page to look at")
    parser.add_argument(
        "--check", action="store_true", help="hold the result against that recorded for this release of transformers"
    )
    parser.add_argument("--record", action="store_true", help="in a checkout: write the recorded result and its page")
    parser.set_defaults(run=_zoo)


def _positive(text: str) -> int:
    value = int(text) if text.isascii() and text.isdigit() else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} was given, a whole number from 1 is wanted")
    return value


class _Version(argparse.Action):
    """``--version``: like the command, then exit."""

    def __init__(self, option_strings: list[str], dest: str, help: str | None = None) -> None:
        super().__init__(option_strings, dest, nargs=0, help=help)

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        _version(argparse.Namespace())
        parser.exit()


def _inspect(options: argparse.Namespace) -> int:
    from tf_backend.cli._inspect import run

    return run(options)


def _serve(options: argparse.Namespace) -> int:
    from tf_backend.cli._serve import run

    return run(options)


def _demo(options: argparse.Namespace) -> int:
    from tf_backend.cli._demo import run

    return run(options)


def _capabilities(options: argparse.Namespace) -> int:
    from tf_backend.cli._capabilities import run

    return run(options)


def _version(options: argparse.Namespace) -> int:
    from tf_backend.cli._version import run

    return run(options)


def _zoo(options: argparse.Namespace) -> int:
    from tf_backend.cli._zoo import run

    return run(options)
