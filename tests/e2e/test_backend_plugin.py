"""The backend that docs/backends.md shows, installed as it stands there, runs a real job through the command line."""

from __future__ import annotations

import importlib
import json
import re
import socket
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from random import Random

import pytest

from ingest.clock import SystemClock
from pipelines.backends import GROUP, JobBackends, backend_names
from pipelines.places import Places
from pipelines.settings import SettingsError, load_settings
from recovery.backend import Observation, StartRequest, Unavailable
from recovery.backends.scheduled import ScheduledBackend
from tests.commands import Commands, commands_in, until

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "backends.md"
JOB = "job"
SCRIPT = """
import json, os, time
from pathlib import Path
E, here = os.environ, Path(__file__).parent
names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TRANSOM_NODE", "TRANSOM_ATTEMPT")
words = {name: E[name] for name in names} | {"secrets": [n for n in E if "TOKEN_FILE" in n]}
(here / f"attempt-{E['TRANSOM_ATTEMPT']}-{E['RANK']}.json").write_text(json.dumps(words))
while not (here / "enough").exists():
    time.sleep(0.02)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the package of the document, as pip would have installed it, on our path and on our children's."""
    blocks = dict(re.findall(r"```(toml|python)\n(.*?)```", DOCUMENT.read_text(encoding="utf-8"), re.DOTALL))
    offered = tomllib.loads(blocks["toml"])["project"]["entry-points"][GROUP]
    site = tmp_path / "site"
    metadata = site / "transom_hosts-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "transom_hosts.py").write_text(blocks["python"])
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: transom-hosts\nVersion: 1.0\n")
    lines = [f"{name} = {where}" for name, where in offered.items()]
    (metadata / "entry_points.txt").write_text("\n".join([f"[{GROUP}]", *lines, ""]))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("TRANSOM_LAUNCHER_TOKEN_FILE", "")
    importlib.invalidate_caches()
    yield site
    sys.modules.pop("transom_hosts", None)


@pytest.fixture
def commands(tmp_path: Path, site: Path) -> Iterator[Commands]:
    (tmp_path / "transom.toml").write_text('[recover.backends.hosts]\nhosts = ["h1", "h2", "h3", "h4"]\n')
    (tmp_path / "train.py").write_text(SCRIPT)
    with commands_in(tmp_path) as commands:
        yield commands


def path(commands: Commands, site: Path) -> str:
    return f"{site}:{commands.folder / 'hiding'}"


def test_the_package_of_the_document_is_found(site: Path) -> None:
    assert backend_names() == ("local", "slurm", "kubernetes", "hosts")


def test_an_option_that_it_does_not_know_is_said_in_a_sentence(tmp_path: Path, site: Path) -> None:
    settings = load_settings(
        None, {"state_dir": tmp_path / "state", "recover": {"backends": {"hosts": {"hosts": ["h1"], "rank": 1}}}}
    )
    backends = JobBackends(settings, Places.of(settings), SystemClock(), Random(1))
    with pytest.raises(SettingsError, match=r"recover\.backends\.hosts: .*rank"):
        backends.named("hosts")


def test_a_job_runs_on_its_hosts_gets_others_and_finishes(commands: Commands, site: Path) -> None:
    folder = commands.folder
    front = commands.start(
        "run",
        "--backend",
        "hosts",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--spares",
        "1",
        "--job",
        JOB,
        "--no-checkpoints",
        "train.py",
        hidden=("torch",),
        PYTHONPATH=path(commands, site),
    )  # fmt: skip  (without torch, which this job does not need and five processes would import)
    until(lambda: len(list(folder.glob("attempt-1-*.json"))) == 4, "all ranks of attempt 1")
    settings = load_settings(folder / "transom.toml", {"state_dir": folder / ".transom"})
    backend = JobBackends(settings, Places.of(settings), SystemClock(), Random(1)).of(JOB)
    assert isinstance(backend, ScheduledBackend)
    seen = backend.observe(JOB)
    assert {node.name: node.state for node in seen.nodes} == {"h1": "active", "h2": "active", "h3": "spare"}
    assert (folder / ".transom" / "jobs" / JOB / "token").stat().st_mode & 0o777 == 0o600

    assert backend.stop(JOB, 1, grace_seconds=1.0, deadline_seconds=30.0)

    def started() -> Observation | None:
        try:
            seen = backend.start(StartRequest(JOB, 2, "second", ("h1", "h2")))
        except Unavailable:
            return None
        return seen if seen.phase == "running" else None

    seen = until(started, "attempt 2 on other hosts")
    assert {rank.node for rank in seen.ranks} == {"h3", "h4"}
    until(lambda: len(list(folder.glob("attempt-2-*.json"))) == 4, "all ranks of attempt 2")
    told = [json.loads(file.read_text()) for file in folder.glob("attempt-*.json")]
    assert {(words["WORLD_SIZE"], words["MASTER_ADDR"]) for words in told} == {("4", socket.gethostname())}
    assert len({words["MASTER_PORT"] for words in told if words["TRANSOM_ATTEMPT"] == "2"}) == 1
    assert not any(words["secrets"] for words in told)

    (folder / "enough").touch()
    said = commands.end(front)
    assert said.code == 0, said
    assert f"job {JOB}: finished; every rank ended with exit code 0" in said.err
    until(lambda: not commands.alive(), "its launchers are gone")
    attended = commands.run("attend", "--job", JOB, PYTHONPATH=path(commands, site))
    assert attended.code == 0, attended
