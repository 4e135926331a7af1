"""Numbers of the Triton kernels, run by triton's interpreter on the CPU.

The interpreter is chosen when triton is imported, so these tests need a process that has TRITON_INTERPRET=1 from the
start: ``test_interpreted.py``, one folder up, starts it. Anywhere else this folder is empty.
"""

from __future__ import annotations

import importlib.util
import os

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import triton_interpreter

    triton_interpreter.repair()
else:
    collect_ignore_glob = ["test_*.py"]
