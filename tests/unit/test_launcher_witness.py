"""When a launcher asks its ranks unasked where they stand, and what it measures of them."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from ingest.clock import ManualClock, SystemClock
from ingest.events import DeviceMetrics
from ingest.rank_socket import Hello
from recovery.launcher.measures import Measures, container_files, host_memory, memory_of
from recovery.launcher.share import Share
from recovery.launcher.stacks import StackRound, StallWatch


def share(*steps: int, phase: str = "train", stop_requested: bool = False) -> Share:
    ranks = [SimpleNamespace(rank=rank, step=step, phase=phase, pid=os.getpid()) for rank, step in enumerate(steps)]
    stamp = lambda rank, topic, at=None: dict(job="job", attempt=1, rank=rank, node="n", sequence=0, at=at)  # noqa: E731
    return cast(Share, SimpleNamespace(alive=ranks, stop_requested=stop_requested, stamp=stamp))


def set_step(one: Share, step: int) -> None:
    for rank in one.alive:
        rank.step = step


def due_at(watch: StallWatch, one: Share, begin: float, end: float) -> list[float]:
    times = [begin + 0.5 * tick for tick in range(int(2 * (end - begin)))]
    return [at for at in times if watch.is_due(one, at)]


def test_a_standstill_is_told_once_after_ten_seconds() -> None:
    watch, one = StallWatch(), share(0, 0)
    for step in range(20):
        set_step(one, step)
        assert not watch.is_due(one, 0.2 * step)
    assert due_at(watch, one, 4.0, 200.0) == [14.0]


def test_slow_steps_have_ten_times_their_length() -> None:
    watch, one = StallWatch(), share(0)
    for step in range(6):
        set_step(one, step)
        watch.is_due(one, 3.0 * step)
    assert due_at(watch, one, 15.0, 60.0) == [45.0]


def test_there_is_one_round_a_minute_however_often_the_job_stands_still() -> None:
    watch, one = StallWatch(), share(0)
    for step in range(10):
        set_step(one, step)
        watch.is_due(one, 0.1 * step)
    assert due_at(watch, one, 1.0, 20.0) == [11.0]
    set_step(one, 10)
    assert due_at(watch, one, 20.0, 100.0) == [71.0]  # it stands still since 20, and was asked at 11


def test_a_start_has_a_minute_and_a_stop_or_an_end_is_no_standstill() -> None:
    assert due_at(StallWatch(), share(-1, -1), 0.0, 100.0) == [60.0]
    for quiet in (share(5, stop_requested=True), share(5, phase="finished"), share()):
        assert due_at(StallWatch(), quiet, 0.0, 100.0) == []


def test_one_rank_that_goes_on_is_progress() -> None:
    watch, one = StallWatch(), share(0, 0)
    for second in range(60):
        cast(Any, one.alive[1]).step = second
        assert not watch.is_due(one, float(second))


class Asked:
    """A rank that was asked for its stacks; `state` is the letter of its process."""

    def __init__(self, rank: int, text: str, state: str) -> None:
        self.rank, self.text, self.state = rank, text, state
        self.alive, self.pid, self.flight, self.flight_known = True, 0, None, False

    def ask_stacks(self) -> bool:
        return True

    def stacks(self) -> str:
        return self.text

    def stat(self) -> SimpleNamespace:
        return SimpleNamespace(state=self.state)


@pytest.mark.parametrize(("state", "seconds"), [("T", 0.3), ("S", 10.0)])
def test_a_stopped_rank_is_not_waited_for_and_one_that_is_busy_is(state: str, seconds: float) -> None:
    clock, published = ManualClock(), list[Any]()
    one = share()
    cast(Any, one).alive = [Asked(0, "in all_reduce", "S"), Asked(1, "", state)]
    asked = StackRound(one, clock, 10.0, published.append, lambda rank: False)
    while (stacks := asked.look()) is None:
        clock.advance(0.1)
    assert stacks == {0: "in all_reduce"}
    assert clock.now() == pytest.approx(seconds, abs=0.25)
    assert [told.state for told in published] == ["S", state], "no answer is evidence too"


def test_a_role_that_a_rank_is_given_later_is_told_once_more() -> None:
    said: list[str] = []
    rank = SimpleNamespace(hello=None)
    one = cast(Any, SimpleNamespace(ranks={0: rank}, _say_started=lambda rank: said.append(rank.hello.role)))
    hello = Hello(job="job", attempt=1, rank=0, token="t", pid=1)
    for role in ("", "", "stage1", "stage1"):
        Share.said_hello(one, msgspec.structs.replace(hello, role=role))
    assert said == ["", "stage1"]


def test_ranks_and_host_are_measured_without_any_library(tmp_path: Path) -> None:
    published: list[DeviceMetrics] = []
    (tmp_path / "memory.current").write_text("1048576\n")
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.stat").write_text("anon 4096\ninactive_file 40000\nactive_file 8576\n")
    measures = Measures(SystemClock(), cast(Any, published.append), tmp_path, tmp_path)
    measures.measure(share(3))
    process, host = published
    assert (process.rank, process.device) == (0, "process")
    assert (process.columns["process.memory.usage"][0] or 0.0) > 2**20
    assert (host.rank, host.device) == (-1, "host")
    used, total = (host.columns[f"system.memory.{name}"][0] or 0.0 for name in ("usage", "limit"))
    assert 0.0 < used < total
    assert host.columns["container.memory.usage"] == (1_000_000.0,)
    assert "container.memory.limit" not in host.columns  # there is none
    assert (host.columns["system.disk.free"][0] or 0.0) > 0.0


@pytest.mark.parametrize(
    ("membership", "made", "found"),
    [
        ("0::/job\n", "job/memory.current", "job/memory.current"),
        (
            "4:memory:/slice/job\n0::/\n",
            "memory/slice/job/memory.usage_in_bytes",
            "memory/slice/job/memory.usage_in_bytes",
        ),
        ("4:memory:/outside/of/us\n", "memory/memory.usage_in_bytes", "memory/memory.usage_in_bytes"),
        ("0::/outside/of/us\n", "memory.current", "memory.current"),
        ("0::/\n", "nothing", None),
    ],
)
def test_the_containers_files_are_found_in_both_versions(
    tmp_path: Path, membership: str, made: str, found: str | None
) -> None:
    (tmp_path / made).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / made).touch()
    (tmp_path / "cgroup").write_text(membership)
    files = container_files(tmp_path, tmp_path / "cgroup")
    assert files.get("container.memory.usage") == (tmp_path / found if found else None)


def test_what_is_not_there_is_not_measured(tmp_path: Path) -> None:
    assert memory_of(2**22 + 1) is None
    assert host_memory(str(tmp_path / "meminfo")) == {}
    assert container_files(tmp_path, tmp_path / "cgroup") == {}
