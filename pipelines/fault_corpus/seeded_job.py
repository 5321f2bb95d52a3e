"""Trains the demo's job with the arguments written down for this attempt, so that one zygote serves many runs."""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[1] / "demo_job" / "train.py"


def main() -> None:
    """`seeded_job.py FOLDER`: FOLDER/<attempt>.json holds the list of arguments."""
    written = Path(sys.argv[1]) / f"{os.environ['TRANSOM_ATTEMPT']}.json"
    sys.argv = [str(SCRIPT), *json.loads(written.read_text(encoding="utf-8"))]
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
