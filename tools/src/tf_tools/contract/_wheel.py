"""Get a wheel of vLLM to read: a file, or a version that pip downloads.

In: what the user named. Out: a `Tree`. A downloaded wheel is cut down to its Python files, a few per cent of it, and kept in the user's
cache folder (``TF_TOOLS_CACHE``, else ``~/.cache/tf_tools``), so that the next record needs no download.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from tf_tools.contract._errors import ContractError
from tf_tools.contract._tree import Tree, from_wheel


def open_wheel(name: str) -> Tree:
    """The tree of a wheel file, or of the released version `name` such as ``0.33.0``.

    Raises:
        ContractError: neither, or pip cannot download it.
    """
    if Path(name).is_file():
        return from_wheel(Path(name))
    if not re.fullmatch(r"\d+(\.\d+)+(\w+)?", name):
        raise ContractError(f"{name} is neither a file nor a version of vLLM such as 0.33.0")
    kept = _cache() / f"vllm-{name}-sources.zip"
    if not kept.is_file():
        kept.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=kept.parent) as folder:
            cut_down(_download(name, Path(folder)), kept)
    return from_wheel(kept)


def cut_down(wheel: Path, kept: Path) -> None:
    """Write the Python files and the metadata of `wheel` to `kept`, with the digest of the whole as the archive's comment."""
    with wheel.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    partial = kept.with_name(f"{kept.name}.{os.getpid()}")
    with zipfile.ZipFile(wheel) as full, zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as small:
        small.comment = digest.encode()
        for name in full.namelist():
            if name.endswith((".py", ".dist-info/METADATA")):
                small.writestr(name, full.read(name))
    partial.replace(kept)


def _cache() -> Path:
    return Path(os.environ.get("TF_TOOLS_CACHE") or Path.home() / ".cache" / "tf_tools") / "wheels"


def _download(version: str, folder: Path) -> Path:
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
    elif shutil.which("uv"):
        pip = ["uv", "tool", "run", "pip"]
    else:
        raise ContractError(f"vLLM {version} must be downloaded, and neither pip nor uv is here; give a wheel file")
    options = ["download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "--dest", str(folder)]
    done = subprocess.run([*pip, *options, f"vllm=={version}"], capture_output=True, text=True, check=False)
    found = list(folder.glob("*.whl"))
    if done.returncode or len(found) != 1:
        last = (done.stderr.strip().splitlines() or ["pip gave no reason"])[-1]
        raise ContractError(f"vLLM {version} could not be downloaded: {last}")
    return found[0]
