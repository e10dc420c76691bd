"""Changelog fragments of each package reach its changelog: one of a type that is not set up would be left out in silence."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"


@pytest.mark.parametrize("package", sorted(folder.name for folder in PACKAGES.iterdir() if folder.is_dir()))
def test_every_fragment_is_in_the_draft(package: str) -> None:
    folder = PACKAGES / package
    fragments = sorted(folder.glob("changes/*.md"))
    assert fragments
    command = [sys.executable, "-m", "towncrier", "build", "--draft", "--version", "0", "--dir", str(folder)]
    command += ["--config", str(folder / "pyproject.toml")]
    draft = "".join(subprocess.run(command, capture_output=True, text=True, check=True).stdout.split())
    for fragment in fragments:
        assert "".join(fragment.read_text().split()) in draft, f"{fragment.name} is in no section"
