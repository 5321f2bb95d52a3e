"""A rank of a job that somebody else launched: who it is by its environment, and how it reaches the bus."""

from __future__ import annotations

import logging
import os
import re
import secrets
import socket
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from pathlib import Path

from .bus import BusMisconfigured, Producer
from .bus_link import BusLink
from .clock import Clock
from .identity import RankIdentity
from .job_store import Agreement, Answer, Question, open_store
from .rank_socket import Hello
from .record_post import RecordProducer

REPORT_TO = "TRANSOM_REPORT_TO"  # kafka, kafka://host:port[,host:port], or http://host:port of `transom record`
TOKEN_FILE = "TRANSOM_REPORT_TOKEN_FILE"
NODE_VARIABLES = ("TRANSOM_NODE", "SLURMD_NODENAME", "NODE_NAME")
JOB_CHARS_MAX = 48
BUFFERED_MAX = 2_000

logger = logging.getLogger("transom")


def restarts_by(environ: Mapping[str, str]) -> str:
    """Who restarts this job, told by the variables that each launcher leaves."""
    if "FT_RANK_MONITOR_IPC_SOCKET" in environ or "FT_LAUNCHER_IPC_SOCKET" in environ:
        return "ft_launcher"
    if "TORCHELASTIC_RUN_ID" in environ:
        return "accelerate (torchrun)" if "ACCELERATE_MIXED_PRECISION" in environ else "torchrun"
    if {"CROSS_RANK", "LOCAL_SIZE"} <= environ.keys():
        return "deepspeed"
    if "SLURM_JOB_ID" in environ:
        return "slurm"
    if "KUBERNETES_SERVICE_HOST" in environ:
        return "kubernetes"
    return "whoever started it"


def job_of(environ: Mapping[str, str]) -> str:
    """What the job is called: TRANSOM_JOB, else as its launcher or scheduler calls it."""
    run_id = environ.get("TORCHELASTIC_RUN_ID", "")
    found = environ.get("TRANSOM_JOB") or (run_id if run_id not in ("", "none") else "")
    if not found and environ.get("SLURM_JOB_ID"):
        found = f"{environ.get('SLURM_JOB_NAME', 'slurm')}-{environ['SLURM_JOB_ID']}"
    found = found or environ.get("JOB_NAME", "") or "job"
    plain = re.sub(r"[^A-Za-z0-9_.-]", "-", found)[:JOB_CHARS_MAX]
    return plain if plain[:1].isalnum() else f"j{plain}"[:JOB_CHARS_MAX]


def foreign_identity(environ: Mapping[str, str], clock: Clock) -> RankIdentity | None:
    """Who this rank is, its link to the bus included; None, and one warning, where that cannot be told.

    The job's name and attempt are agreed later; until then what is reported waits.
    """
    try:
        rank = int(environ.get("RANK") or environ.get("SLURM_PROCID") or 0)
        world = int(environ.get("WORLD_SIZE") or environ.get("SLURM_NTASKS") or 1)
        local_rank = int(environ.get("LOCAL_RANK") or environ.get("SLURM_LOCALID") or 0)
        port = int(environ.get("MASTER_PORT") or 0)
    except ValueError as error:
        logger.warning("transom: nothing is reported: the environment is wrong: %s", error)
        return None
    host = environ.get("MASTER_ADDR", "")
    if world > 1 and not (host and port):
        logger.warning("transom: nothing is reported: MASTER_ADDR and MASTER_PORT are not set, so ranks cannot agree")
        return None
    if world > 1:
        import_module(
            "torch.distributed"
        )  # here, by the main thread: two threads that import torch trip over each other
    node = next((environ[name] for name in NODE_VARIABLES if environ.get(name)), "") or socket.gethostname()
    return RankIdentity(
        job="", attempt=0, rank=rank, node=node, socket="", pid=os.getpid(), local_rank=local_rank,
        visible_devices=environ.get("CUDA_VISIBLE_DEVICES"),
        link=partial(_link, dict(environ), clock, node, local_rank, world, (host, port)),
    )  # fmt: skip


def _link(
    environ: Mapping[str, str], clock: Clock, node: str, local_rank: int, world: int, address: tuple[str, int],
    hello: Hello,
) -> BusLink:  # fmt: skip
    question = Question(rank=hello.rank, local_rank=local_rank, node=node, nonce=secrets.token_hex(16))

    def proposal() -> Answer:
        # A second of rank 0's clock grows over every kind of restart: a requeue and a new submission too.
        return Answer(job=job_of(environ), attempt=int(clock.now()))

    agreement = Agreement(question, world, proposal, partial(open_store, *address), clock)
    return BusLink(
        hello, agreement, partial(open_producer, environ, clock, hello.rank), clock, node=node, local_rank=local_rank,
        world_size=world, leads=local_rank == 0, restarts_by=restarts_by(environ),
    )  # fmt: skip


def open_producer(environ: Mapping[str, str], clock: Clock, rank: int) -> Producer:
    """To where TRANSOM_REPORT_TO says. Raises BusUnavailable or BusMisconfigured."""
    to = environ.get(REPORT_TO, "")
    if to.startswith(("http://", "https://")):
        return RecordProducer(to, _secret(environ.get(TOKEN_FILE)), buffered_max=BUFFERED_MAX)
    if to != "kafka" and not to.startswith("kafka://"):
        raise BusMisconfigured(f"{REPORT_TO} is {to!r}; give kafka, kafka://host:port, or http://host:port of `record`")
    from .kafka_bus import KafkaBus, KafkaSecurity

    given = {name: environ.get(f"TRANSOM_BUS__{name}") for name in (
        "BOOTSTRAP_SERVERS", "PREFIX", "SECURITY_PROTOCOL", "SSL_CAFILE", "SASL_MECHANISM", "SASL_USERNAME",
        "SASL_PASSWORD_FILE",
    )}  # fmt: skip
    servers = to.removeprefix("kafka://") if to != "kafka" else given["BOOTSTRAP_SERVERS"] or ""
    if not servers:
        raise BusMisconfigured("TRANSOM_BUS__BOOTSTRAP_SERVERS is not set; give the brokers as host:port")
    security = KafkaSecurity(
        protocol=given["SECURITY_PROTOCOL"] or "PLAINTEXT",  # type: ignore[arg-type]
        ca_file=given["SSL_CAFILE"],
        sasl_mechanism=given["SASL_MECHANISM"],  # type: ignore[arg-type]
        sasl_username=given["SASL_USERNAME"],
        sasl_password=_secret(given["SASL_PASSWORD_FILE"]) or None,
    )
    bus = KafkaBus(
        servers, clock=clock, prefix=given["PREFIX"] or "transom", client_id=f"transom-rank-{rank}", security=security,
        buffered_max=BUFFERED_MAX,
    )  # fmt: skip
    return bus.producer()


def _secret(file: str | None) -> str:
    if not file:
        return ""
    try:
        return Path(file).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise BusMisconfigured(f"the file {file} cannot be read ({error}); give one that can") from error
