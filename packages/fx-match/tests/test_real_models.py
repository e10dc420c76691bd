"""Modules of transformers as real input: every trace is complete, and every child call lands on one call expression."""

import ast
import functools
import inspect
import linecache

import pytest
import torch
from fx_match import Trace, trace
from torch import fx, nn

transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES = {
    "llama": {},
    "qwen2": {},
    "qwen3": {},
    "mistral": {},
    "smollm3": {"no_rope_layers": [1, 0]},
    "gemma2": {"query_pre_attn_scalar": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {},
    "olmo2": {},
    "glm": {"pad_token_id": 0},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_inner": 96, "n_positions": 64},
}


@functools.cache
def model_and_calls(family: str) -> tuple[nn.Module, dict[str, tuple[tuple, dict]]]:
    """A tiny model on meta, and the arguments with which each of its modules was called in one run."""
    config = transformers.AutoConfig.for_model(
        family, **(FAMILIES[family] if family == "gpt2" else COMMON | FAMILIES[family])
    )
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
    calls: dict[str, tuple[tuple, dict]] = {}
    handles = [
        module.register_forward_pre_hook(
            lambda module, args, kwargs, name=name: calls.setdefault(name, (args, dict(kwargs))), with_kwargs=True
        )
        for name, module in model.named_modules()
    ]
    tokens = torch.zeros(1, 6, dtype=torch.long, device="meta")
    mask = torch.zeros(1, 1, 6, 6, device="meta")  # a mask of two dimensions would be looked into
    with torch.no_grad():
        model(input_ids=tokens, attention_mask=mask, use_cache=False)
    for handle in handles:
        handle.remove()
    return model, calls


def own_modules(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The first instance of each class of the model's own file, but for containers that are never called."""
    seen, found = set(), []
    for name, module in model.named_modules():
        if type(module) not in seen and type(module).__module__.startswith("transformers.models"):
            seen.add(type(module))
            found.append((name, module))
    return found


def trace_of(family: str, name: str) -> Trace:
    model, calls = model_and_calls(family)
    args, kwargs = calls[name]
    with torch.no_grad():
        return trace(model.get_submodule(name), args, kwargs, leaves=attention_leaves())


@functools.cache
def attention_leaves() -> dict:
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attend(module, query, key, value, *args, **kwargs):
        return query.transpose(1, 2).contiguous(), None

    return {function: attend for name, function in ALL_ATTENTION_FUNCTIONS.items() if name == "sdpa"}


def call_expressions(trace: Trace) -> set[tuple[int, int, int, int]]:
    lines, start = inspect.getsourcelines(trace.code)
    filename = trace.code.co_filename
    tree = ast.parse("".join(linecache.getlines(filename)))
    return {
        (node.lineno, node.col_offset, node.end_lineno, node.end_col_offset)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and start <= node.lineno < start + len(lines)
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_class_of_the_model_is_traced_to_its_end(family: str) -> None:
    model, calls = model_and_calls(family)
    names = [name for name, _ in own_modules(model) if name in calls]
    assert len(names) >= 4
    for name in names:
        traced = trace_of(family, name)
        assert traced.complete, (family, name, str(traced.stop))
        assert traced.module_class is type(model.get_submodule(name))
        traced.graph.lint()


@pytest.mark.parametrize("family", FAMILIES)
def test_each_child_call_has_the_span_of_one_call_expression(family: str) -> None:
    model, calls = model_and_calls(family)
    checked = 0
    for name, _ in own_modules(model):
        if name not in calls:
            continue
        traced = trace_of(family, name)
        expressions = call_expressions(traced)
        for node in traced.graph.nodes:
            if node.op == "call_module":
                span = traced.span(node)
                assert span is not None
                assert (span.lineno, span.col, span.end_lineno, span.end_col) in expressions, (name, node, span)
                checked += 1
    assert checked >= 5


def resized(value, length: int):
    """Captured arguments as real numbers, with the sequence length of 6 replaced."""
    if isinstance(value, torch.Tensor):
        shape = [length if size == 6 else size for size in value.shape]
        return torch.rand(shape).mul(4).to(value.dtype)
    if isinstance(value, dict):
        return {key: resized(item, length) for key, item in value.items()}
    return type(value)(resized(item, length) for item in value) if isinstance(value, (tuple, list)) else value


def tensors_of(args: tuple, kwargs: dict) -> list:
    values = (*args, *kwargs.values())
    return [value for value in values if isinstance(value, torch.Tensor) or (isinstance(value, tuple) and value)]


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "phi3", "gpt2"])
def test_a_graph_computes_what_the_module_computes_at_another_length(family: str) -> None:
    model, calls = model_and_calls(family)
    torch.manual_seed(0)
    real = type(model)(model.config).eval()
    checked = 0
    for name, module in own_modules(real):
        if name not in calls or name.count(".") < 1 or "rotary" in name:
            continue
        args, kwargs = calls[name]
        with torch.no_grad():
            traced = trace(module, resized(args, 6), resized(kwargs, 6), leaves=attention_leaves())
            assert traced.complete, (name, traced.stop)
            assert not [guard for guard in traced.guards if guard.kind == "size"]
            args, kwargs = resized(args, 9), resized(kwargs, 9)
            expected = module(*args, **kwargs)
            found = fx.Interpreter(module, graph=traced.graph).run(*tensors_of(args, kwargs))
        if isinstance(expected, tuple):
            expected, found = expected[0], found[0]
        assert expected.shape[1] == 9
        torch.testing.assert_close(found, expected)
        checked += 1
    assert checked >= 3
