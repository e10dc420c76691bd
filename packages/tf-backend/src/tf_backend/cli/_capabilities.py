"""``tf-backend capabilities``: print the data that planning uses, or record it from the installed engine."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from tf_backend import capabilities
from tf_backend.errors import OptionRefused


def run(options: argparse.Namespace) -> int:
    """Print or write one `Capabilities` as JSON."""
    if options.action == "show":
        found = capabilities.default() if options.name is None else capabilities.shipped(options.name)
        sys.stdout.write(found.to_json().decode())
        return 0
    from tf_backend.demo import prepare_environment

    distribution = capabilities.installed()
    if distribution is not None:
        prepare_environment(distribution.name)
    # The engine and its libraries print while they are imported; standard output is the record's.
    with contextlib.redirect_stdout(sys.stderr):
        data = capabilities.record().to_json()
    if options.output is None:
        sys.stdout.write(data.decode())
        return 0
    target = Path(options.output)
    try:
        target.write_bytes(data)
    except OSError as error:
        raise OptionRefused(f"--output {target} cannot be written: {error.strerror}. Name another file.") from error
    print(f"wrote {target}", file=sys.stderr)
    return 0
