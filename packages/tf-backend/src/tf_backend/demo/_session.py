"""One engine in this process, and completions that arrive piece by piece.

In: a model folder and engine settings. Out: `Session.stream`, an iterator over `Chunk`; `Session.throughput` after it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tf_backend.capabilities import installed
from tf_backend.demo._throughput import Stopwatch, Throughput
from tf_backend.errors import EngineMissing, OptionRefused
from tf_backend.model.config import read_config
from tf_backend.plugin import check_registered

DType = Literal["auto", "bfloat16", "float16", "float32"]

_LONGEST_CONTEXT = 2048
"""Tokens: enough for a demonstration, and a cache that fits into the memory of a small machine."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt as the model gets it."""

    text: str
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Chunk:
    """New text of one completion; `index` is that of its prompt. `finish_reason` is None until the last one."""

    index: int
    text: str
    finish_reason: str | None


class Session:
    """An engine that serves one model through its transformers definition, in this process.

    `model_impl` is vLLM's option of that name. Building one loads the weights; `tf_backend.demo.prepare_environment` must
    have run before vLLM was imported. Raises `EngineMissing` without vLLM, `OptionRefused` when the plugin is switched
    off, `ConfigError`, and whatever the engine raises.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        dtype: DType = "auto",
        compiled: bool = False,
        model_impl: Literal["transformers", "vllm"] = "transformers",
        trust_remote_code: bool = False,
        max_num_seqs: int = 8,
    ) -> None:
        if installed() is None:
            raise EngineMissing("serving a model")
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        arguments = EngineArgs(
            model=os.fspath(folder),
            model_impl=model_impl,
            dtype=dtype,
            enforce_eager=not compiled,
            max_model_len=_context_length(folder, trust_remote_code),
            max_num_seqs=max_num_seqs,
            trust_remote_code=trust_remote_code,
            disable_log_stats=True,
            use_tqdm_on_load=False,
        )
        if model_impl == "transformers":
            check_registered()
        self._engine: Any = LLMEngine.from_engine_args(arguments)
        self._tokenizer: Any = self._engine.get_tokenizer()
        self._limit = int(self._engine.model_config.max_model_len)
        self._batches = 0
        self.throughput: Throughput | None = None
        """Of the last batch that was streamed to its end."""

    def encode(self, text: str) -> Prompt:
        """One user message, through the tokenizer's chat template where it has one."""
        if getattr(self._tokenizer, "chat_template", None):
            message = [{"role": "user", "content": text}]
            rendered = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
            ids = self._tokenizer.encode(rendered, add_special_tokens=False)
        else:
            ids = self._tokenizer.encode(text)
        return Prompt(text, tuple(int(token) for token in ids))

    def stream(self, prompts: Sequence[Prompt], *, max_tokens: int) -> Iterator[Chunk]:
        """Complete all prompts as one batch, greedily; chunks of different prompts come interleaved.

        Raises `OptionRefused` for a prompt that is empty or leaves no room for an answer.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        for prompt in prompts:
            if not 0 < len(prompt.token_ids) < self._limit:
                raise OptionRefused(
                    f"a prompt of {len(prompt.token_ids)} tokens was given; it must have at least one, and fewer than the "
                    f"{self._limit} that the engine was started for. Give another with `--prompt`."
                )
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, output_kind=RequestOutputKind.DELTA)
        self._batches += 1
        names = {f"{self._batches}-{index}": index for index in range(len(prompts))}
        for name, prompt in zip(names, prompts, strict=True):
            (rendered,) = self._engine.renderer.render_cmpl([{"prompt_token_ids": list(prompt.token_ids)}])
            self._engine.add_request(name, rendered, sampling.clone())
        stopwatch = Stopwatch()
        stopwatch.start({name: len(prompts[index].token_ids) for name, index in names.items()})
        try:
            while self._engine.has_unfinished_requests():
                outputs = self._engine.step()
                stopwatch.step({output.request_id: len(output.outputs[0].token_ids) for output in outputs})
                for output in outputs:
                    piece = output.outputs[0]
                    yield Chunk(names[output.request_id], piece.text, piece.finish_reason if output.finished else None)
        finally:
            if self._engine.has_unfinished_requests():
                self._engine.abort_request(list(names))
        self.throughput = stopwatch.result()

    def close(self) -> None:
        """Let the engine go. The session is of no use afterwards."""
        self._engine.engine_core.shutdown()


def _context_length(folder: str | os.PathLike[str], trust_remote_code: bool) -> int:
    config = read_config(os.fspath(folder), trust_remote_code=trust_remote_code).get_text_config()
    longest = getattr(config, "max_position_embeddings", None)
    return min(_LONGEST_CONTEXT, longest) if isinstance(longest, int) and longest > 0 else _LONGEST_CONTEXT
