"""One server on real weights, asked by the client that people use; and how it ends."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tf_backend.demo import prepare_smollm2

pytestmark = pytest.mark.engine

START = 600
"""Seconds: two processes import vLLM, on a machine that may have other work."""
MODEL = "smollm2"
CONTEXT = 512
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
SUBJECTS = ("river", "piano", "Roman", "winter", "bread", "engine", "library", "desert")
BEGINNINGS = ("The", "Once a", "My favourite", "In the story, the")


@dataclass(frozen=True, slots=True)
class Server:
    """A server in a session of its own."""

    process: subprocess.Popen[bytes]
    port: int
    log: Path

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def wait_until(self, is_reached: Callable[[], bool]) -> None:
        until = time.monotonic() + START
        while not is_reached():
            assert self.process.poll() is None, f"ended with {self.process.returncode}:\n{self.text()[-4000:]}"
            assert time.monotonic() < until, f"not reached in {START} s:\n{self.text()[-4000:]}"
            time.sleep(0.2)

    def is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.address}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def end(self, number: int, patience: float = 30) -> int:
        """Send a signal to the server alone; its exit status."""
        self.process.send_signal(number)
        return self.process.wait(timeout=patience)

    def left_over(self) -> list[int]:
        """Processes of its session that are still there, after a moment for those that see their parent gone."""
        until = time.monotonic() + 5
        while (left := _session(self.process.pid)) and time.monotonic() < until:
            time.sleep(0.1)
        return left


def _session(leader: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != leader:
            try:
                state, _, _, session = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
            except OSError:
                continue
            if int(session) == leader and state != "Z":
                found.append(int(entry.name))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _start(folder: Path, scratch: Path, *options: str) -> Server:
    port = _free_port()
    log = scratch / "server.log"
    command = [sys.executable, "-m", "tf_backend", "serve", str(folder), "--host", "127.0.0.1", "--port", str(port)]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CACHE_ROOT": str(scratch)}
    for name in ("OMP_NUM_THREADS", "VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CPU_KVCACHE_SPACE"):
        environment.pop(name, None)  # other tests set them for engines of their own
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*command, "--dtype", "float32", "--enforce-eager", *options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    return Server(process, port, log)


def _kill(server: Server) -> None:
    for pid in (*_session(server.process.pid), server.process.pid):
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    server.process.wait()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    options = ("--served-model-name", MODEL, "--max-model-len", str(CONTEXT), "--max-num-seqs", "16")
    options += ("--kv-cache-memory-bytes", str(1 << 29))
    started = _start(prepare_smollm2(), tmp_path_factory.mktemp("server"), *options)
    try:
        started.wait_until(started.is_healthy)
        yield started
    finally:
        _kill(started)


@pytest.fixture(scope="module")
def client(server: Server) -> Any:
    from openai import OpenAI

    return OpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=120, max_retries=0)


def test_our_classes_serve_the_model(server: Server, client: Any) -> None:
    assert [model.id for model in client.models.list().data] == [MODEL]
    assert "tf-backend serves LlamaForCausalLM: 151 fusions" in server.text()


def test_completion_and_its_usage(client: Any) -> None:
    answer = client.completions.create(prompt="The capital of France is", max_tokens=5, **GREEDY)
    (choice,) = answer.choices
    assert "Paris" in choice.text
    assert choice.finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (5, 5)


def test_chat_uses_the_template_of_the_model(client: Any) -> None:
    message = {"role": "user", "content": "What is the capital of France? Answer in one short sentence."}
    answer = client.chat.completions.create(messages=[message], max_tokens=24, **GREEDY)
    (choice,) = answer.choices
    assert "Paris" in choice.message.content
    assert choice.finish_reason == "stop"
    assert "<|im_" not in choice.message.content


def test_a_stream_adds_up_to_the_whole(client: Any) -> None:
    asked = {"prompt": "Water boils at", "max_tokens": 24, **GREEDY}
    whole = client.completions.create(**asked).choices[0]
    pieces = [piece.choices[0] for piece in client.completions.create(stream=True, **asked) if piece.choices]
    assert len(pieces) > 4
    assert "".join(piece.text for piece in pieces) == whole.text
    assert pieces[-1].finish_reason == whole.finish_reason


def test_log_probabilities_are_of_the_tokens_that_were_chosen(client: Any) -> None:
    answer = client.completions.create(prompt="One, two, three,", max_tokens=6, logprobs=3, **GREEDY)
    (choice,) = answer.choices
    found = choice.logprobs
    assert "".join(found.tokens) == choice.text
    for token, value, top in zip(found.tokens, found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) == 3
        assert value <= 0
        assert top[token] == pytest.approx(value)
        assert value == pytest.approx(max(top.values()))


def test_a_stop_string_ends_the_text_before_it(client: Any) -> None:
    asked = {"prompt": "One, two, three, four,", "max_tokens": 16, **GREEDY}
    free = client.completions.create(**asked).choices[0].text
    stop = free[len(free) // 2 :][:3]
    choice = client.completions.create(stop=[stop], **asked).choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == free[: free.index(stop)]


def test_many_requests_at_once_are_answered_as_one_at_a_time(server: Server, client: Any) -> None:
    from openai import AsyncOpenAI

    prompts = [f"{beginning} {subject}" for beginning in BEGINNINGS for subject in SUBJECTS]
    alone = [client.completions.create(prompt=text, max_tokens=8, **GREEDY).choices[0].text for text in prompts]

    async def together() -> list[str]:
        async with AsyncOpenAI(base_url=f"{server.address}/v1", api_key="none", timeout=300, max_retries=0) as asking:
            calls = (asking.completions.create(prompt=text, max_tokens=8, **GREEDY) for text in prompts)
            return [answer.choices[0].text for answer in await asyncio.gather(*calls)]

    assert len(set(alone)) > 16
    assert asyncio.run(together()) == alone


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"max_tokens": -3},
        {"prompt": "word " * (CONTEXT + 1)},
        {"logprobs": 1000},
        {"logit_bias": {"9999999": 1}},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
def test_a_wrong_request_is_told_and_the_server_lives(wrong: dict[str, Any], server: Server, client: Any) -> None:
    from openai import BadRequestError

    with pytest.raises(BadRequestError) as refused:
        client.completions.create(**({"prompt": "Hello", "max_tokens": 2} | GREEDY | wrong))
    assert refused.value.status_code == 400
    assert server.is_healthy()


def test_a_model_that_is_not_served_is_not_found(client: Any) -> None:
    from openai import NotFoundError

    with pytest.raises(NotFoundError):
        client.completions.create(model="other", prompt="Hello")


def test_sigterm_ends_the_server_and_all_that_it_started(server: Server) -> None:
    """The last test of this server."""
    children = _session(server.process.pid)
    assert children
    assert server.end(signal.SIGTERM) == 0, server.text()[-2000:]
    assert server.left_over() == []
    assert "Traceback" not in server.text()
    assert "error:" not in server.text()
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # connections that were closed just now are remembered
        probe.bind(("127.0.0.1", server.port))
        probe.listen()


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
def test_a_signal_while_the_engine_starts(
    number: int, status: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    started = _start(checkpoint("llama"), tmp_path, "--skip-tokenizer-init", "--kv-cache-memory-bytes", str(1 << 28))
    try:
        started.wait_until(
            lambda: len(_session(started.process.pid)) > 1
        )  # the engine, beside multiprocessing's tracker
        assert started.end(number, patience=90) == status, started.text()[-2000:]
        assert started.left_over() == []
        assert "Traceback" not in started.text(), started.text()[-3000:]
        assert ("error: interrupted" in started.text()) == (number == signal.SIGINT)
    finally:
        _kill(started)
