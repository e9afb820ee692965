"""`python -m tests.support.softcuda COMMAND ...`: run a command with an emulated device."""

from __future__ import annotations

import os
import sys

from tests.support.softcuda.emulation import emulated_environment

if __name__ == "__main__":
    os.environ.update(emulated_environment(os.environ.get("SOFTCUDA") or "a100"))
    os.execvp(sys.argv[1], sys.argv[1:])
