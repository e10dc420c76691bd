"""Parse, run the command, and turn whatever it raises into one line and a status.

In: arguments. Out: 0 done, 1 error, 2 the model is refused, 130 interrupted.
"""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Sequence

from tf_backend.cli._parser import build_parser
from tf_backend.cli._present import describe, root_cause
from tf_backend.errors import ModelRefused

_INTERRUPTED = 130
"""What a shell gives for a process that SIGINT ended."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; `arguments` are those of the process when None. Returns the exit status, and raises nothing."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        options = build_parser().parse_args(given)
        status: int = options.run(options)
        sys.stdout.flush()
        return status
    except SystemExit as end:  # --help and --version
        return end.code if isinstance(end.code, int) else 0
    except BrokenPipeError:
        # The reader of our output has left, which is its right. Nothing must be flushed into the pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except Exception as error:
        if "--debug" in given:
            traceback.print_exc()
        print(f"error: {describe(error)}", file=sys.stderr)
        return 2 if isinstance(root_cause(error), ModelRefused) else 1
