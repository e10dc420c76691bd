"""A dump made by other sources of our packages: those of a commit, or those installed in a folder.

In: a commit or a folder. Out: a dump, made in a process that finds those packages before ours.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


class ReplayError(ValueError):
    """There is no such commit or folder, or a dump with those sources failed."""


@contextmanager
def sources_of(commit: str) -> Iterator[list[Path]]:
    """Folders that hold our packages as they were at `commit`, for as long as the block lasts."""
    root = Path(__file__).resolve().parents[4]
    with tempfile.TemporaryDirectory(prefix="replay-") as scratch:
        archive = subprocess.run(["git", "-C", str(root), "archive", commit, "packages"], capture_output=True)
        if archive.returncode:
            raise ReplayError(f"git has no `{commit}`: {archive.stderr.decode().strip()}")
        subprocess.run(["tar", "-x", "-C", scratch], input=archive.stdout, check=True)
        yield sorted(Path(scratch, "packages").glob("*/src"))


def dump_with(packages: Sequence[Path], folder: Path, arguments: Sequence[str]) -> None:
    """Run ``dump FOLDER ARGUMENTS`` where `packages` are found first.

    Raises:
        ReplayError: it failed; holds what it said last.
    """
    missing = [path for path in packages if not path.is_dir()]
    if missing or not packages:
        raise ReplayError(f"no packages in {missing[0] if missing else 'that commit'}")
    own = Path(__file__).resolve().parents[2]
    paths = os.pathsep.join(map(str, (*packages, own)))
    command = [sys.executable, "-m", "tf_tools.replay", "dump", str(folder), *arguments]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no word"])[-1]
        raise ReplayError(f"the dump with those packages failed: {last}")
