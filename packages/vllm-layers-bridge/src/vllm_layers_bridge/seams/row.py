"""The row of tokens that is being computed: where a rewritten forward finds the positions of its tokens."""

from __future__ import annotations

import torch

ROW = "engine_row"
"""Name of the attribute through which a module reaches the row."""


class Row:
    """`positions` [tokens] of the row, None between steps."""

    def __init__(self) -> None:
        self.positions: torch.Tensor | None = None
