"""What `transom doctor` says of checkpoints: what this host allows, and what a restart of each job would load now."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

from ckpt_engine.directio import takes_direct
from ckpt_engine.errors import CheckpointError
from ckpt_engine.memory_room import tightest_room
from ckpt_engine.status import AgreedStep, EngineStatus
from pipelines.checkpoints import EngineCatalog
from pipelines.errors import StatedError
from pipelines.finding import Finding
from pipelines.places import NAME, Places
from pipelines.run import node_names, read_job
from pipelines.settings import Settings, SettingsError
from recovery.backend import Unavailable
from recovery.launcher.job_files import BrokenJobFile, read_file
from recovery.launcher.protocol import JobSpec, NodeFile

JOBS_MAX = 20
OPEN_FILES_MIN = 4096  # two slots, a connection and a stored file for each of some hundred ranks, and the keeper's
MIB = 2**20


def examine_checkpoints(settings: Settings) -> Iterator[Finding]:
    """Findings about this host, then about each job that is not over."""
    yield _memory(settings.checkpoint.memory_bytes_max)
    yield _open_files()
    yield _locked_memory()
    try:
        places = Places.of(settings)
    except SettingsError:
        return  # said by the check of the state folder
    yield _direct_writes(places.state)
    for job in _unfinished(places)[:JOBS_MAX]:
        yield from _job(places, job, EngineCatalog(places, objects_url=settings.checkpoint.objects.url or ""))


def _memory(cap_bytes: int) -> Finding:
    room = tightest_room()
    if room is None:
        return Finding("checkpoint memory", "note", "neither cgroup nor /proc/meminfo tell how much memory there is")
    left = f"{room.where} has {room.free_bytes // MIB} of {room.limit_bytes // MIB} MiB left"
    if room.free_bytes < cap_bytes:
        text = f"{left}, checkpoint.memory_bytes_max is {cap_bytes // MIB} MiB: large states will be refused"
        return Finding("checkpoint memory", "note", text, "raise that limit, or save less on each node")
    return Finding("checkpoint memory", "ok", f"{left}; slots take at most {cap_bytes // MIB} MiB, none of /dev/shm")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < OPEN_FILES_MIN:
        mend = f"raise it to {OPEN_FILES_MIN} (limits.conf, LimitNOFILE=)"
        return Finding("open files", "note", f"at most {hard} a process: too few for an engine of many ranks", mend)
    return Finding("open files", "ok", f"{_limit(soft)} a process, engines may have {_limit(hard)}")


def _locked_memory() -> Finding:
    soft = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    gpus = Path("/proc/driver/nvidia/gpus").exists()
    if gpus and soft != resource.RLIM_INFINITY:
        text = f"at most {soft // 1024} KiB: slots may not be pinned for copies from a GPU, which are slower then"
        return Finding("locked memory", "note", text, "set memlock to unlimited (limits.conf, LimitMEMLOCK=)")
    why = "enough" if soft == resource.RLIM_INFINITY else "only copies from a GPU need it"
    return Finding("locked memory", "ok", f"{_limit(soft)}; {why}")


def _direct_writes(state: Path) -> Finding:
    folder = state / "checkpoints"
    try:
        direct = takes_direct(folder if folder.is_dir() else state)
    except OSError as error:
        text = f"{folder} cannot be written: {error.strerror}"
        return Finding("checkpoint folder", "note", text, "mend the file system, or set state_dir")
    if direct:
        return Finding("checkpoint folder", "ok", f"{folder} takes O_DIRECT: saves do not push out the page cache")
    return Finding("checkpoint folder", "note", f"{folder} does not take O_DIRECT: saves go through the page cache")


def _unfinished(places: Places) -> list[str]:
    try:
        folders = [path for path in places.jobs.iterdir() if NAME.fullmatch(path.name)]
    except OSError:
        return []
    return sorted(path.name for path in folders if not (path / "outcome.json").exists())


def _job(places: Places, job: str, catalog: EngineCatalog) -> Iterator[Finding]:
    try:
        spec, options = read_job(places, job)
        if not options.checkpoints:
            return
        statuses = {status.node: status for status in catalog.statuses(job)}
        placed = _placed(places, spec, node_names(spec, options))
        agreed = catalog.agreed(job, list(statuses.values()), placed)
    except (StatedError, CheckpointError, Unavailable, OSError) as error:
        yield Finding(f"checkpoints of {job}", "note", str(error))
        return
    for node in node_names(spec, options):
        ranks = [rank for rank, where in placed if where == node]
        yield _node(job, node, ranks, statuses.get(node), agreed)


def _node(job: str, node: str, ranks: list[int], status: EngineStatus | None, agreed: AgreedStep | None) -> Finding:
    name = f"checkpoints of {job} on {node}"
    if status is None:
        text = f"no engine answers; {_would_load(ranks, None, agreed)}"
        return Finding(name, "note", text, f"transom ckpt serve --job {job} --node {node}")
    text = _would_load(ranks, status, agreed)
    if not status.keeper_pid:
        return Finding(name, "note", f"{text}; memory ends with the engine: {status.keeper_error or 'no keeper'}")
    if status.persist_error:
        return Finding(name, "note", f"{text}; {status.persist_error}")
    return Finding(name, "ok", f"{text}; a keeper (process {status.keeper_pid}) holds the memory too")


def _would_load(ranks: list[int], status: EngineStatus | None, agreed: AgreedStep | None) -> str:
    if not ranks:
        return "a spare: it holds nothing of its own"
    if agreed is None:
        return "no step is whole on all ranks: a restart would begin anew"
    held = {shard.rank for shard in (status.shards if status else ()) if _is(shard, agreed)}
    if held >= set(ranks):
        tier = "memory"
    else:
        tier = next((word for word in ("peer", "disk", "object") if word in agreed.tier), "disk")
    return f"a restart would load step {agreed.step} from {tier}"


def _is(shard: object, agreed: AgreedStep) -> bool:
    return (getattr(shard, "attempt", -1), getattr(shard, "step", -1)) == (agreed.attempt, agreed.step)


def _placed(places: Places, spec: JobSpec, nodes: tuple[str, ...]) -> list[tuple[int, str]]:
    """Which rank runs where: as the launchers say, or as a job begins where they do not say it of every rank."""
    found: dict[int, str] = {}
    for node in nodes:
        try:
            told = read_file(places.node_file(spec.job, node), NodeFile)
        except BrokenJobFile:
            continue
        if told is not None:
            found.update((process.rank, node) for process in told.ranks)
    if set(found) != set(range(spec.world_size)):
        found = {rank: nodes[rank // spec.nproc_per_node] for rank in range(spec.world_size)}
    return sorted(found.items())


def _limit(number: int) -> str:
    return "as many as it wants" if number == resource.RLIM_INFINITY else str(number)
