"""Options that touch the weights and are not served are refused by name, before an engine starts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from tf_backend.errors import OptionRefused
from tf_backend.model.options import _check_weight_options, check_engine_options

PLAIN = {
    "enable_sleep_mode": False,
    "enable_expert_parallel": False,
    "enable_ep_weight_filter": False,
}


def config(*, weight_transfer: object = None, **options: object) -> Any:
    values = SimpleNamespace(**{**PLAIN, **options})
    return SimpleNamespace(model_config=values, parallel_config=values, weight_transfer_config=weight_transfer)


def test_none_of_them_is_fine() -> None:
    _check_weight_options(config())
    _check_weight_options(config(enable_ep_weight_filter=True))


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"enable_sleep_mode": True}, "--enable-sleep-mode"),
        ({"weight_transfer": object()}, "--weight-transfer-config"),
        ({"enable_expert_parallel": True, "enable_ep_weight_filter": True}, "--enable-ep-weight-filter"),
    ],
)
def test_each_is_refused_by_name(options: dict[str, object], named: str) -> None:
    with pytest.raises(OptionRefused, match=named):
        _check_weight_options(config(**options))


@pytest.mark.parametrize(
    ("own", "said"),
    [({"quant_method": "fp8"}, "this one is quantized by `fp8`"), (None, "Leave out `--quantization fp8`")],
)
def test_a_quantized_checkpoint_and_one_that_is_to_be_quantized(own: object, said: str) -> None:
    hf_config = SimpleNamespace(quantization_config=own)
    model_config = SimpleNamespace(quantization="fp8", hf_config=hf_config)
    with pytest.raises(OptionRefused, match=said):
        check_engine_options(SimpleNamespace(quant_config=object(), model_config=model_config))
