"""The command ``tf-backend``: inspect a model, run the demo, show what the engine can do.

In: arguments. Out: an exit status. Nothing heavy is imported before a command needs it.
"""

from tf_backend.cli._main import main

__all__ = ["main"]
