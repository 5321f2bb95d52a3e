"""A command with a real Slurm around it: `python -m tests.run_in_slurm transom bench recovery --only slurm`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.slurm_lab import slurm_lab


def main() -> int:
    """The command's exit code; the Slurm goes with it."""
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder, slurm_lab(Path(folder) / "slurm") as lab:
        environ = {**lab.environ, "TRANSOM_HOST": "127.0.0.1"}  # all of its nodes are this machine
        return subprocess.run(sys.argv[1:], env=environ, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
