"""The rich console that commands print to."""

from __future__ import annotations

import os
import sys

from rich.console import Console

_WIDTH = 140
"""Columns where the output goes to a file or a pipe, so that no table is cut to 80."""


def make_console() -> Console:
    """A console on standard output: as wide as the terminal, or wide enough for tables where there is none."""
    is_open_ended = not sys.stdout.isatty() and "COLUMNS" not in os.environ
    return Console(file=sys.stdout, width=_WIDTH if is_open_ended else None, highlight=False, emoji=False, markup=False)
