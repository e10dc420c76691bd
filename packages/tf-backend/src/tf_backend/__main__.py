"""``python -m tf_backend`` is the command ``tf-backend``."""

import sys

from tf_backend.cli import main

if __name__ == "__main__":
    sys.exit(main())
