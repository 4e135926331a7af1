"""``python -m twofold`` is the ``twofold`` command."""

import os
import sys

# `python -m` puts the working folder first on the path. Where that is the repository's root, its folders (kernels, ...)
# would answer for packages of the same name that other libraries look for.
if sys.path and os.path.realpath(sys.path[0]) == os.path.dirname(os.path.realpath(__file__)):
    del sys.path[0]

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
