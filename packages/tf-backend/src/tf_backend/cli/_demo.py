"""``tf-backend demo``: plan, start the engine here, stream completions, and say how long each phase took."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from tf_backend import capabilities
from tf_backend.cli._console import make_console
from tf_backend.cli._held_logs import held_logs
from tf_backend.cli._model import model_folder
from tf_backend.cli._present import EngineFailed
from tf_backend.demo import Prompt, Session, Throughput, is_prepared, prepare_environment, prepare_smollm2
from tf_backend.demo import default_folder as smollm2_folder
from tf_backend.errors import EngineMissing, ModelRefused, TfBackendError

_PROMPTS = (
    "What is gravity? Answer in two sentences.",
    "Write a haiku about the sea.",
    "Name three things that every kitchen needs, and say why.",
)


@dataclass(slots=True)
class _Phases:
    """Prints what is going on and remembers how long it took."""

    console: Console
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, doing: str) -> Iterator[None]:
        begin = time.perf_counter()
        with self.console.status(Text(f"{doing} …")):
            yield
        self.seconds[doing] = time.perf_counter() - begin
        self.console.print(Text(f"{doing}: {self.seconds[doing]:.1f} s", style="dim"))


def run(options: argparse.Namespace) -> int:
    """Run the demo; every failure is an exception."""
    distribution = capabilities.installed()
    if distribution is None:
        raise EngineMissing("the demo")
    prepare_environment(distribution.name, verbose=options.verbose)
    console = make_console()
    phases = _Phases(console)
    folder = _folder(options, phases)
    if options.model_impl == "transformers":
        _plan(folder, options, phases)
    session = _start(folder, options, phases)
    try:
        prompts = [session.encode(text) for text in options.prompt or _PROMPTS]
        _stream(console, session, prompts, options.max_tokens)
    except TfBackendError:
        raise
    except Exception as error:
        raise EngineFailed("generating", error) from error
    finally:
        session.close()
    if session.throughput is not None:
        _report(console, session.throughput, phases)
    return 0


def _folder(options: argparse.Namespace, phases: _Phases) -> Path:
    if options.model is not None:
        return model_folder(options.model, trust_remote_code=options.trust_remote_code, allow_hub=False)
    if is_prepared(smollm2_folder()):
        return smollm2_folder()
    with phases.phase("Converting SmolLM2-135M-Instruct, this once"):
        return prepare_smollm2()


def _plan(folder: Path, options: argparse.Namespace, phases: _Phases) -> None:
    with phases.phase("Planning"):
        from tf_backend.cli._render import render_fusions, render_header
        from tf_backend.plan import plan_folder

        plan = plan_folder(folder, capabilities=capabilities.default(), trust_remote_code=options.trust_remote_code)
    if not plan.is_served:
        raise ModelRefused(plan.refusals, architecture=plan.provenance.architecture)
    render_header(phases.console, plan)
    render_fusions(phases.console, plan)


def _start(folder: Path, options: argparse.Namespace, phases: _Phases) -> Session:
    doing = "Starting the engine, compiling" if options.compiled else "Starting the engine"
    try:
        with phases.phase(doing), held_logs(shown=options.verbose):
            return Session(
                folder,
                dtype=options.dtype,
                compiled=options.compiled,
                model_impl=options.model_impl,
                trust_remote_code=options.trust_remote_code,
            )
    except TfBackendError:
        raise
    except Exception as error:
        raise EngineFailed("starting", error) from error


def _stream(console: Console, session: Session, prompts: list[Prompt], max_tokens: int) -> None:
    """Panels that grow on a terminal; elsewhere each completion is printed when it ends."""
    texts = [""] * len(prompts)
    chunks = session.stream(prompts, max_tokens=max_tokens)
    if not console.is_terminal:
        for chunk in chunks:
            texts[chunk.index] += chunk.text
            if chunk.finish_reason is not None:
                console.print(Text(f"\n> {prompts[chunk.index].text}\n{texts[chunk.index].strip()}"))
        return
    with Live(console=console, refresh_per_second=12, vertical_overflow="visible") as live:
        for chunk in chunks:
            texts[chunk.index] += chunk.text
            panels = (Panel(Text(text), title=Text(prompt.text)) for prompt, text in zip(prompts, texts, strict=True))
            live.update(Group(*panels))


def _report(console: Console, throughput: Throughput, phases: _Phases) -> None:
    console.print(
        Text(
            f"\nprompt: {throughput.prompt_tokens} tokens in {throughput.prompt_seconds:.2f} s "
            f"({throughput.prompt_rate:.0f} tokens/s)\n"
            f"generation: {throughput.generated_tokens} tokens in {throughput.generation_seconds:.2f} s "
            f"({throughput.generation_rate:.1f} tokens/s)"
        )
    )
    spent = ", ".join(f"{doing.lower()} {seconds:.1f} s" for doing, seconds in phases.seconds.items())
    console.print(Text(f"before that: {spent}", style="dim"))
