"""Types that our source does not say: written by hand, one row for each expression that stands for something of vLLM.

A row is matched by file, function and the expression's own text, and is a use itself: its path must exist in every build. A row for a
whole call says what is called there. Several rows for one expression must all hold. A row that nothing matches is an error.
"""

from __future__ import annotations

from dataclasses import dataclass

from tf_tools.contract._options import NAMESPACE


@dataclass(frozen=True, slots=True)
class Typed:
    """In `scope` (qualified name of a function) of `file`, `expression` stands for `path`; an empty path says that it is not vLLM's."""

    file: str
    scope: str
    expression: str
    path: str


_OPTIONS = NAMESPACE
"""The parsed options of ``vllm serve``."""
_CONFIG = "vllm.config:VllmConfig()"
_BACKEND = "vllm.v1.attention.backend:AttentionBackend"
_LINEAR = "vllm.model_executor.layers.linear"
_REGISTERED = "vllm.model_executor.models.registry:_RegisteredModel()"
_RUNNER = "vllm.model_executor.layers.fused_moe.runner.moe_runner:MoERunner()"
_ROUTED = "vllm.model_executor.layers.fused_moe.routed_experts:RoutedExperts()"

TYPED: tuple[Typed, ...] = (
    Typed("moe_runner/_ranks.py", "places_on_rank", "routed", _ROUTED),
    Typed("moe_runner/balance.py", "left_behind", "runner", _RUNNER),
    Typed("moe_runner/balance.py", "left_behind", "routed", _ROUTED),
    Typed("tf_backend/model/balance.py", "BalancedExperts.count_experts", "routed", _ROUTED),
    Typed("tf_backend/model/balance.py", "BalancedExperts.set_eplb_state", "runner", _RUNNER),
    Typed("tf_backend/model/balance.py", "BalancedExperts.update_physical_experts_metadata", "runner", _RUNNER),
    Typed(
        "tf_backend/capabilities/_experts.py",
        "moe_exchanges_tokens",
        "communicator",
        "vllm.distributed.device_communicators.base_device_communicator:DeviceCommunicatorBase",
    ),
    Typed("moe_runner/written.py", "_written_experts", "layer", ""),
    Typed("moe_runner/written.py", "_written_block", "layer", ""),
    Typed("tf_backend/cli/_serve_options.py", "parse", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_options.py", "_parser", "command", "vllm.entrypoints.cli.serve:ServeSubcommand()"),
    Typed("tf_backend/cli/_serve_options.py", "_bound_cache", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_preflight.py", "preflight", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_preflight.py", "preflight", "config", _CONFIG),
    Typed("tf_backend/cli/_serve_preflight.py", "_check_folder", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_preflight.py", "_check_tokenizer", "model_config", "vllm.config:ModelConfig()"),
    Typed("tf_backend/cli/_serve_preflight.py", "_is_of_hub", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_preflight.py", "_engine_config", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_server.py", "serve", "arguments", _OPTIONS),
    Typed("tf_backend/cli/_serve_server.py", "_is_single", "arguments", _OPTIONS),
    Typed("tf_backend/model/latent.py", "latent_cache", "vllm_config", _CONFIG),
    Typed("tf_backend/model/latent.py", "check_expanded", "vllm_config", _CONFIG),
    Typed("tf_backend/model/latent.py", "_why_not", "vllm_config", _CONFIG),
    Typed("tf_backend/model/latent.py", "_backend", "vllm_config", _CONFIG),
    Typed("tf_backend/model/latent.py", "check_expanded", "backend", _BACKEND),
    Typed("tf_backend/model/latent.py", "_why_not", "backend", _BACKEND),
    Typed("tf_backend/model/options.py", "_check_weight_options", "vllm_config", _CONFIG),
    Typed("tf_backend/model/prepare.py", "prepare", "vllm_config", _CONFIG),
    Typed("tf_backend/model/prepare.py", "_trusted_code", "model_config", "vllm.config:ModelConfig()"),
    Typed(
        "tf_backend/capabilities/_activations.py",
        "gated_activations",
        "layer",
        "vllm.model_executor.layers.activation:SiluAndMul()",
    ),
    Typed("tf_backend/capabilities/_record.py", "record", "backend", _BACKEND),
    Typed("tf_backend/capabilities/_record.py", "_select", "backend", _BACKEND),
    Typed("tf_backend/capabilities/_record.py", "_kv_cache_dtypes", "backend", _BACKEND),
    Typed("tf_backend/capabilities/_record.py", "_takes", "backend", _BACKEND),
    Typed("tf_backend/capabilities/_record.py", "_supports_sinks", "chosen", _BACKEND),
    Typed(
        "tf_backend/demo/_session.py", "Session.stream", "self._engine.renderer", "vllm.renderers.base:BaseRenderer()"
    ),
    Typed("tf_backend/demo/_session.py", "Session.encode", "getattr(self._tokenizer, 'chat_template', None)", ""),
    Typed(
        "tf_backend/demo/_session.py",
        "Session.encode",
        "self._tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)",
        "",  # keywords that vLLM hands on to the tokenizer of transformers
    ),
    Typed(
        "tf_backend/model/apply.py",
        "apply",
        "head",
        "vllm.model_executor.layers.vocab_parallel_embedding:ParallelLMHead()",
    ),
    Typed("tf_backend/model/options.py", "check_engine_options", "vllm_config", _CONFIG),
    Typed("tf_backend/model/options.py", "publish_plan", "vllm_config", _CONFIG),
    Typed("tf_backend/plugin.py", "_is_registered", "registry", "vllm.model_executor.models:ModelRegistry"),
    Typed("tf_backend/plugin.py", "_is_registered", "known", _REGISTERED),
    Typed("tf_backend/plugin.py", "check_registered", "known", _REGISTERED),
    Typed(
        "tf_backend/plugin.py",
        "check_registered",
        "getattr(known, 'module_name', '')",
        "vllm.model_executor.models.registry:_LazyRegisteredModel().module_name",
    ),
    *(
        Typed("tf_backend/weights/load.py", "_copy", "loader(target, tensor)", f"{path}().weight_loader")
        for path in (
            f"{_LINEAR}:ReplicatedLinear",
            f"{_LINEAR}:ColumnParallelLinear",
            f"{_LINEAR}:RowParallelLinear",
            "vllm.model_executor.layers.vocab_parallel_embedding:VocabParallelEmbedding",
        )
    ),
    *(
        Typed("tf_backend/weights/load.py", "_copy", "loader(target, tensor, rule.shard)", f"{path}().{loader}")
        for path in (f"{_LINEAR}:MergedColumnParallelLinear", f"{_LINEAR}:QKVParallelLinear")
        for loader in ("weight_loader", "weight_loader_v2")
    ),
    Typed(
        "vllm_layers_bridge/seams/attention.py",
        "attention_interface",
        "layer",
        "vllm.model_executor.layers.attention:Attention()",
    ),
    Typed("vllm_layers_bridge/seams/attention.py", "attach_attention", "cache_config", "vllm.config:CacheConfig()"),
)
