"""The face of Transom: all that a training script or an integration imports.

    import transom

    run = transom.init()
    loader = transom.watch(model, optimizer, loader)
    ckpt = transom.Checkpointer()

Importing it costs next to nothing and loads neither torch nor numpy; each name brings in what it needs when
it is first used. A user's project may have an `ingest/` or a `ckpt_engine/` of its own, so a rank always gets
ours under private names. What integrations need (`Verdict`, `decode`, `TOPICS`, `frame`) comes under the
ordinary names, and is not for ranks.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, overload

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    import pandas
    import torch

    from ckpt_engine.adapters.dcp import EngineReader as EngineReader
    from ckpt_engine.adapters.dcp import EngineWriter as EngineWriter
    from ckpt_engine.adapters.hf_trainer import EngineCallback as EngineCallback
    from ckpt_engine.adapters.hf_trainer import EngineTrainer as EngineTrainer
    from ckpt_engine.adapters.lightning_io import EngineCheckpointIO as EngineCheckpointIO
    from ckpt_engine.adapters.lightning_io import EngineModelParallelStrategy as EngineModelParallelStrategy
    from ckpt_engine.blocks import Shard as Shard
    from ckpt_engine.loading import LoadReport, Policy, Verify, Views
    from ckpt_engine.ticket import Ticket
    from detectors.verdict import Verdict as Verdict
    from ingest.events import TOPICS as TOPICS
    from ingest.events import Message
    from ingest.identity import RankIdentity
    from ingest.run import LoggingHandler as LoggingHandler
    from ingest.run import Run

__all__ = [
    "TOPICS",
    "Checkpointer",
    "EngineCallback",
    "EngineCheckpointIO",
    "EngineModelParallelStrategy",
    "EngineReader",
    "EngineTrainer",
    "EngineWriter",
    "LoggingHandler",
    "Shard",
    "Verdict",
    "decode",
    "frame",
    "init",
    "watch",
]

ADAPTERS = {  # by the name that is imported: the module that knows the other library
    "EngineCallback": "hf_trainer",
    "EngineCheckpointIO": "lightning_io",
    "EngineModelParallelStrategy": "lightning_io",
    "EngineReader": "dcp",
    "EngineTrainer": "hf_trainer",
    "EngineWriter": "dcp",
}
RANK_PID = "TRANSOM_RANK_PID"  # set by `init`: a process that inherits it with another pid is a child of a rank
SCHEDULER_IDS = (
    "SLURM_JOB_ID",
    "SLURM_STEP_ID",
    "SLURM_PROCID",
    "SLURM_ARRAY_JOB_ID",
    "SLURM_ARRAY_TASK_ID",
    "SLURMD_NODENAME",
    "JOB_COMPLETION_INDEX",
    "POD_NAME",
    "POD_UID",
    "POD_NAMESPACE",
    "NODE_NAME",
)
SCHEDULER_ID_CHARS_MAX = 256

Batch = TypeVar("Batch")


def init(role: str = "") -> Run:
    """Begin to report this training process, from its environment. Later calls return the same run.

    `role` says what makes this rank's work unlike that of others, such as `f"stage{pipeline_rank}"`: detection
    compares a rank with those of the same role. Without it, roles are learned from the ranks' times.

    Under another launcher (torchrun, srun, accelerate, deepspeed, ft_launcher) it reports to where TRANSOM_REPORT_TO
    says; see docs/instrument.md. Without either, and in a rank's children, the run takes all calls and does nothing.
    """
    started = _in_rank("ingest", "run")
    identity = None if started.is_started() else _identity()
    run: Run = started.start_run(identity, _in_rank("ingest", "clock").SystemClock())
    _register_pickling(type(run))
    if role:
        run.take_role(role)
    return run


@overload
def watch(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None: ...


@overload
def watch(
    model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, dataloader: Iterable[Batch]
) -> Iterable[Batch]: ...


def watch(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    dataloader: Iterable[Batch] | None = None,
) -> Iterable[Batch] | None:
    """Time every step of this model by itself; iterate over the loader that is returned.

    Call it last, when the model is wrapped and moved to its device. Do not register a communication hook on
    the model afterwards; one that is there before stays, and less is reported.
    """
    run = init()
    if not run.active:
        return dataloader
    try:
        timers = _in_rank("ingest", "torch_timers")
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        sentence = "transom.watch needs PyTorch, which is not installed; run: pip install 'transom[ckpt]'"
        raise ModuleNotFoundError(sentence, name=error.name) from None
    loader: Iterable[Batch] | None = timers.watch_training(run, model, optimizer, dataloader)
    return loader


class Checkpointer:
    """Saves training state in the memory of the node's checkpoint engine and on disk, and loads it.

    What is not given comes from the environment that `transom run` sets. Without an engine's socket every
    save goes to `directory` and waits for it. While it works, the run's phase is `checkpoint`.
    """

    def __init__(
        self,
        socket: str | None = None,
        directory: str | None = None,
        *,
        job: str | None = None,
        attempt: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        node: str | None = None,
        **options: Any,
    ) -> None:
        given = os.environ
        socket = socket or given.get("TRANSOM_CKPT_SOCKET")
        directory = directory or given.get("TRANSOM_CKPT_DIR")
        if not socket and not directory:
            raise ValueError(
                "transom.Checkpointer has nowhere to save: neither TRANSOM_CKPT_SOCKET nor TRANSOM_CKPT_DIR is set; "
                "start with `transom run`, or give it a directory"
            )
        self._run = init()
        self._engine = _in_rank("ckpt_engine", "client").Checkpointer(
            socket,
            directory,
            job=job or given.get("TRANSOM_JOB") or "job",
            attempt=attempt if attempt is not None else int(given.get("TRANSOM_ATTEMPT") or 1),
            rank=rank if rank is not None else int(given.get("RANK") or 0),
            world_size=world_size if world_size is not None else int(given.get("WORLD_SIZE") or 1),
            node=node or given.get("TRANSOM_NODE") or "localhost",
            **options,
        )

    def save(self, state: dict[str, Any], step: int) -> Ticket:
        """Keep `state` as it is after `step`; returns as soon as it is copied. See `ckpt_engine.client`."""
        with self._run.phase("checkpoint"):
            ticket: Ticket = self._engine.save(state, step)
        return ticket

    def load(
        self,
        into: dict[str, Any],
        policy: Policy | None = "newest",
        verify: Verify = "first",
        *,
        step: int | None = None,
    ) -> LoadReport | None:
        """Make `into` what it was at the newest step that all ranks have ("verified": that training has proved good),
        or after the step with that number; None: there is none. See `ckpt_engine.loading`."""
        with self._run.phase("checkpoint"):
            report: LoadReport | None = self._engine.load(into, policy, verify, step=step)
        return report

    def load_views(
        self, policy: Policy | None = "newest", verify: Verify = "first", *, step: int | None = None
    ) -> Views | None:
        """The state itself without a copy: its tensors are private views of the checkpoint's memory, and keep it."""
        with self._run.phase("checkpoint"):
            views: Views | None = self._engine.load_views(policy, verify, step=step)
        return views

    def await_verified(self) -> None:
        """Return once what was loaded with `verify="deferred"` is known to be what was saved, else raise."""
        self._engine.await_verified()

    def verify_before(self, optimizer: torch.optim.Optimizer) -> None:
        """Let `optimizer` call `await_verified` before its next step; `load` does so for those it is given."""
        self._engine.verify_before(optimizer)

    def adopt(self, state: dict[str, Any]) -> int:
        """With `mode="fenced"`: move parameters and optimizer tensors to where the engine can copy them while training
        computes; the bytes that live there. The first save does it, too. See `ckpt_engine.fenced`."""
        adopted: int = self._engine.adopt(state)
        return adopted

    def fence(self) -> float:
        """With `mode="fenced"`: call it before anything of a saved state is written; the seconds that it waited.
        Optimizers in the state do so by themselves before each step."""
        waited: float = self._engine.fence()
        return waited

    def fence_before(self, optimizer: torch.optim.Optimizer) -> None:
        """With `mode="fenced"`: fence before each step of an optimizer of which only the state_dict is saved."""
        self._engine.fence_before(optimizer)

    def prepare(self, state: dict[str, Any]) -> None:
        """Have memory made ready for states like this one while training goes on: the first save then takes no longer
        than any other. `load` does it for what it was given."""
        self._engine.prepare(state)

    def close(self) -> None:
        """Let go of the engine; what is saved stays."""
        self._engine.close()


def decode(headers: Sequence[tuple[str, bytes]], value: bytes) -> Any:
    """The message in a record of our topics. Raises `ingest.codec.Undecodable`, whatever the bytes."""
    from ingest.codec import Codec
    from recovery.action import RECOVERY_TYPES

    return Codec(RECOVERY_TYPES).decode(headers, value)


def frame(messages: Iterable[Message]) -> pandas.DataFrame:
    """The metrics among these messages as a pandas table, one row per rank and step: for notebooks."""
    from ingest.metrics_frame import metrics_frame

    return metrics_frame(messages)


def __getattr__(name: str) -> Any:
    if name == "LoggingHandler":
        value: Any = _in_rank("ingest", "run").LoggingHandler
    elif name == "Shard":
        value = _in_rank("ckpt_engine", "blocks").Shard
    elif name in ADAPTERS:
        value = getattr(_in_rank("ckpt_engine", f"adapters.{ADAPTERS[name]}"), name)
    elif name == "Verdict":
        value = importlib.import_module("detectors.verdict").Verdict
    elif name == "TOPICS":
        value = importlib.import_module("ingest.events").TOPICS
    else:
        raise AttributeError(f"module 'transom' has no attribute {name!r}; it has {', '.join(__all__)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)


def _in_rank(room: str, module: str) -> ModuleType:
    """A module of one of our two rooms for ranks, under a private name that no user's project has."""
    private = f"_transom_{room}"
    if private not in sys.modules:
        here = os.path.dirname(os.path.abspath(__file__))  # noqa: PTH100, PTH120 — pathlib would cost 5 ms
        folder = f"{here}/{room}"
        spec = importlib.util.spec_from_file_location(
            private, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )
        assert spec is not None
        assert spec.loader is not None
        package = importlib.util.module_from_spec(spec)
        sys.modules[private] = package
        try:
            spec.loader.exec_module(package)
        except BaseException:
            del sys.modules[private]
            raise
    return importlib.import_module(f"{private}.{module}")


def _identity() -> RankIdentity | None:
    """Who this process is; None where there is no launcher, or it is only a rank's child."""
    import logging  # here, because it is most of what importing us would cost

    logger = logging.getLogger("transom")
    environment = os.environ
    if not environment.get("TRANSOM_SOCKET") and not environment.get("TRANSOM_REPORT_TO"):
        logger.info("transom: neither TRANSOM_SOCKET nor TRANSOM_REPORT_TO is set; nothing is reported")
        return None
    if environment.setdefault(RANK_PID, str(os.getpid())) != str(os.getpid()):
        return None  # a data loader worker or another child: the rank itself reports
    if not environment.get("TRANSOM_SOCKET"):
        foreign: RankIdentity | None = _in_rank("ingest", "foreign_job").foreign_identity(
            environment, _in_rank("ingest", "clock").SystemClock()
        )
        return foreign
    try:
        identity: RankIdentity = _in_rank("ingest", "identity").RankIdentity(
            job=environment["TRANSOM_JOB"],
            attempt=int(environment["TRANSOM_ATTEMPT"]),
            rank=int(environment["RANK"]),
            node=environment["TRANSOM_NODE"],
            socket=environment["TRANSOM_SOCKET"],
            token=environment.get("TRANSOM_TOKEN", ""),
            pid=os.getpid(),
            local_rank=int(environment.get("LOCAL_RANK") or 0),
            resume_step=_resume_step(environment),
            allow_inject=environment.get("TRANSOM_ALLOW_INJECT") == "1",
            visible_devices=environment.get("CUDA_VISIBLE_DEVICES"),
            scheduler_ids={
                name: environment[name][:SCHEDULER_ID_CHARS_MAX] for name in SCHEDULER_IDS if environment.get(name)
            },
        )
    except KeyError as error:
        logger.warning("transom: nothing is reported: %s is not set; start with `transom run`", error)
        return None
    except ValueError as error:
        logger.warning("transom: nothing is reported: the environment is wrong: %s", error)
        return None
    return identity


def _resume_step(environment: Mapping[str, str]) -> int | None:
    text = environment.get("TRANSOM_RESUME_STEP", "")
    return int(text) if text else None


def _register_pickling(run_type: type[Any]) -> None:
    """A run inside an object that goes to a data loader worker arrives there as that process's own."""
    import copyreg

    copyreg.pickle(run_type, _reduce_run)


def _reduce_run(run: Any) -> tuple[Any, tuple[()]]:
    return init, ()
