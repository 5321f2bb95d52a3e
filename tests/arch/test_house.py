"""The house keeps its shape: imports, sizes, names and what a wheel holds."""

from __future__ import annotations

import ast
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("ingest", "detectors", "recovery", "ckpt_engine", "ui", "pipelines")
FILE_LINES_MAX = 400
FUNCTION_LINES_MAX = 70
FORBIDDEN_NAMES = {"utils", "util", "common", "core", "helpers", "base", "manager", "handler", "processor"}


def sources() -> list[Path]:
    return [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))] + [ROOT / "transom.py"]


def test_imports_point_one_way() -> None:
    result = subprocess.run(
        [Path(sysconfig.get_path("scripts")) / "lint-imports"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("path", sources(), ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_is_one_sentence_and_short(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text.count("\n") <= FILE_LINES_MAX
    if path.name == "__init__.py":
        assert text == "", "an __init__.py is empty"
        return
    tree = ast.parse(text)
    assert ast.get_docstring(tree), "the first line says what the file is"
    assert path.stem not in FORBIDDEN_NAMES
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            assert node.end_lineno - node.lineno < FUNCTION_LINES_MAX, f"{node.name} is too long"


def test_no_file_of_the_console_shadows_a_package() -> None:
    """Streamlit puts ui/ first on the path: a ui/recovery.py would then be `recovery`."""
    taken = set(ROOMS) | set(sys.stdlib_module_names) | {"pandas", "numpy", "httpx", "streamlit", "transom", "msgspec"}
    assert not {path.stem for path in (ROOT / "ui").glob("*.py")} & taken


def test_light_rooms_stay_light() -> None:
    """A training environment has none of the heavy libraries; what runs there must not ask for them."""
    heavy = "pyod, pandas, streamlit, duckdb, pyarrow, fastapi, kafka, torch, sklearn"
    program = (
        "import sys, transom, ingest.events, ingest.codec, ingest.sqlite_bus, detectors.verdict, recovery.policy, "
        "recovery.backend, pipelines.__main__\n"
        f"loaded = [name for name in '{heavy}'.split(', ') if name in sys.modules]\n"
        "sys.exit(f'loaded: {loaded}' if loaded else 0)"
    )
    result = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_the_wheel_holds_the_rooms_and_nothing_else(tmp_path: Path) -> None:
    uv = Path(sysconfig.get_path("scripts")) / "uv"
    build = [
        uv,
        "build",
        "--quiet",
        "--wheel",
        "--no-build-isolation",
        "--python",
        sys.executable,
        "--out-dir",
        tmp_path,
    ]
    subprocess.run(build, cwd=ROOT, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    top = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert top == {*ROOMS, "transom.py"}
    for needed in (
        "detectors/logs/rules/",
        "pipelines/broker/pom.xml",
        "pipelines/demo_job/train.py",
        "ui/pages/",
        "ui/config/",
        "ui/entry/",
    ):
        assert any(name.startswith(needed) for name in names), f"{needed} is not in the wheel"
