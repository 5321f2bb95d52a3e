"""What `transom recover` need not load: each of these would be added to the time that a machine is without recovery."""

import subprocess
import sys

DEAR = ("numpy", "pyod", "pandas", "torch", "duckdb", "pyarrow", "fastapi", "detectors.ensemble", "ckpt_engine.engine")


def test_recovery_starts_without_what_only_other_services_need() -> None:
    asked = f"import sys, pipelines.recover; print([name for name in {DEAR!r} if name in sys.modules])"
    told = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=True, timeout=300)
    assert told.stdout.strip() == "[]"
