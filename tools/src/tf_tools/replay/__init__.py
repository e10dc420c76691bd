"""Every forward that is rewritten, as text, for every model type: dumped, and compared with that of other sources.

python -m tf_tools.replay dump FOLDER [NAME ...]
python -m tf_tools.replay diff OLD NEW
python -m tf_tools.replay against COMMIT [NAME ...]

A change in fusions or planning shows here as a diff of what will run, type by type, before anything runs.
"""

from tf_tools.replay._diff import Change, compare
from tf_tools.replay._dump import dump

__all__ = ["Change", "compare", "dump"]
