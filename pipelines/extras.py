"""The optional parts of the installation: which library proves each, and the one sentence where it is missing."""

from __future__ import annotations

from importlib.util import find_spec

from pipelines.errors import StatedError

EXTRAS = {  # extra: (the module that proves it, what works only with it)
    "detect": ("pyod", "PyOD evidence in verdicts"),
    "ledger": ("duckdb", "transom record, the API, the console's data"),
    "ui": ("streamlit", "transom console"),
    "ckpt": ("torch", "checkpoints in memory, the demo"),
    "historic": ("google.protobuf", "replays of TensorBoard and W&B files"),
    "collect": ("psutil", "host samples and NVML in transom collect"),
    "kafka": ("kafka", "the Kafka bus"),
    "k8s": ("kubernetes", "the Kubernetes backend"),
    "apprise": ("apprise", "notices by chat, mail and pager"),
}
LEDGER_MODULES = ("duckdb", "pyarrow", "fastapi", "uvicorn", "prometheus_client", "httpx")
ALSO_OF = {**dict.fromkeys((*LEDGER_MODULES, "httpcore", "starlette"), "ledger"), "pandas": "ui", "pynvml": "collect"}


class MissingExtra(StatedError, ImportError):
    """A library is not installed; the text names the extra that brings it."""


def missing_extra(extra: str, purpose: str) -> MissingExtra:
    """What a door raises whose library is not installed."""
    return MissingExtra(f"{purpose} needs an extra that is not installed; run: pip install 'transom[{extra}]'")


def extra_of(module: str) -> str | None:
    """The extra that brings a module (or a module inside it); None for what no extra brings."""
    top = module.partition(".")[0]
    return next((extra for extra, (proof, _) in EXTRAS.items() if top == proof), None) or ALSO_OF.get(top)


def is_there(module: str) -> bool:
    """Whether a module could be imported; nothing is."""
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):  # a finder that refuses, a module without a spec: it could not be imported
        return False


def require(extra: str, purpose: str) -> None:
    """Raise MissingExtra where the extra is not installed: before anything was started that would need it."""
    modules = LEDGER_MODULES if extra == "ledger" else (EXTRAS[extra][0],)
    if not all(map(is_there, modules)):
        raise missing_extra(extra, purpose)
