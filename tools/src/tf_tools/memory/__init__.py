"""Memory and time that loading takes, beside vLLM's own implementation: each load in a fresh process.

python -m tf_tools.memory make FOLDER --gib 2        # a llama-shaped checkpoint of random bytes, in shards
python -m tf_tools.memory compare FOLDER             # transformers (what is installed) against vllm, in turns
"""

from tf_tools.memory._checkpoint import make_large_checkpoint
from tf_tools.memory._load import Load, measure

__all__ = ["Load", "make_large_checkpoint", "measure"]
