"""A Python beside ours that also has other checkpoint libraries, so that one process can time them and us.

They are not dependencies of anything here: they go to a folder that is removed afterwards, and none of them may bring
a torch of its own, or two different ones would be compared.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pipelines

# dlrover does not ask for all that it needs
LIBRARIES = (("torch-checkpointing",), ("lm-resiliency",), ("dlrover", "grpcio"))
NOT_THESE = ("torch", "torchvision", "numpy", "triton")  # ours are used; a condition that never holds leaves them out
INSTALL_SECONDS_MAX = 600.0


def install_peers(folder: Path, told: Callable[[str], object]) -> tuple[str, list[str]]:
    """The interpreter, and one line for each library that could not be installed."""
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    tool = str(uv) if uv.exists() else shutil.which("uv")
    if tool is None:
        return sys.executable, ["the other libraries were not installed: there is no uv; run: pip install uv"]
    told("making a virtual environment for the other libraries")
    _run([tool, "venv", "--quiet", "--python", sys.executable, str(folder)])
    python = folder / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    ours = [sysconfig.get_path("purelib"), str(Path(pipelines.__file__).resolve().parents[1])]
    (folder / "lib" / version / "site-packages" / "ours.pth").write_text("\n".join(ours) + "\n", encoding="utf-8")
    overrides = folder / "overrides.txt"
    overrides.write_text("".join(f"{name} ; python_version < '3'\n" for name in NOT_THESE), encoding="utf-8")
    absent = []
    for library, *needs in LIBRARIES:
        told(f"installing {library}")
        reason = _run(
            [tool, "pip", "install", "--quiet", "--python", str(python), "--overrides", str(overrides), library, *needs]
        )
        if reason:
            absent.append(f"{library} could not be installed: {reason}")
    return str(python), absent


def _run(command: list[str]) -> str:
    """Empty, or the last words of a command that failed."""
    environment = {name: value for name, value in os.environ.items() if name != "VIRTUAL_ENV"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=INSTALL_SECONDS_MAX, env=environment, check=False
        )
    except subprocess.TimeoutExpired:
        return f"it took more than {INSTALL_SECONDS_MAX:.0f} s"
    lines = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")
