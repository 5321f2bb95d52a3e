"""What the reporter's thread sends, flush by flush."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.clock import ManualClock, SystemClock
from ingest.events import LogLine, Phase
from ingest.identity import RankIdentity
from ingest.rank_socket import PACKET_BYTES_MAX, Hello, RankSocket
from ingest.reporter import LINE_CHARS_MAX, LINES_MAX, Reporter
from ingest.step_rows import SCALARS_MAX, StepRows
from tests.fake_launcher import FakeLauncher


class Rank:
    """A reporter whose flushes are called by the test, and what it reports on."""

    def __init__(self, path: Path) -> None:
        self.clock = ManualClock(1_000.0)
        self.identity = RankIdentity(job="job", attempt=3, rank=1, node="node-0", socket=str(path))
        self.rows = StepRows(self.clock)
        self.socket = RankSocket(str(path), Hello(job="job", attempt=3, rank=1, token="", pid=1), self.clock)
        self.phase: Phase = "train"
        self.asked: list[bytes] = []
        self.reporter = Reporter(
            self.identity, self.rows, self.socket, lambda: self.phase, self.clock, on_inject=self.asked.append
        )

    def step(self, number: int, **scalars: float) -> None:
        self.rows.log(number, scalars)
        self.rows.finish()
        self.rows.begin()


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[FakeLauncher]:
    launcher = FakeLauncher(tmp_path / "t.sock")
    yield launcher
    launcher.close()


@pytest.fixture
def rank(launcher: FakeLauncher) -> Iterator[Rank]:
    rank = Rank(launcher.path)
    yield rank
    rank.socket.close()


def test_a_flush_without_steps_is_a_heartbeat_with_phase_and_step(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.tick()
    rank.rows.begin()
    rank.phase = "collective"
    rank.reporter.tick()
    launcher.wait_for(lambda: len(launcher.metrics()) == 2)
    first, second = launcher.metrics()
    assert (first.job, first.attempt, first.rank, first.node, first.at) == ("job", 3, 1, "node-0", 1_000.0)
    assert (first.phase, first.step, first.steps, first.sequence) == ("train", -1, (), 0)
    assert (second.phase, second.step, second.sequence) == ("collective", 1, 1)


def test_the_steps_of_a_flush_are_columns_with_none_where_a_step_has_no_sample(
    launcher: FakeLauncher, rank: Rank
) -> None:
    rank.step(1, loss=2.0)
    rank.step(2, loss=math.nan, rate=0.1)
    rank.step(3, loss=-math.inf)
    rank.reporter.tick()
    launcher.wait_for(launcher.metrics)
    (message,) = launcher.metrics()
    assert message.steps == (1, 2, 3)
    assert message.step == 4
    assert message.columns == {"loss": (2.0, None, None), "rate": (None, 0.1, None)}
    assert math.isnan(message.column("loss")[1])  # type: ignore[arg-type]
    assert message.column("loss")[2] == -math.inf


def test_no_packet_is_larger_than_the_limit_and_no_step_is_lost(launcher: FakeLauncher, rank: Rank) -> None:
    for step in range(1_000):
        rank.step(step, **{f"metric_number_{index}": step / 3 for index in range(40)})
    rank.reporter.tick()
    rank.socket.drain(1.0)
    launcher.wait_for(lambda: len(launcher.rows()) == 1_000)
    assert max(len(body) for _, body in launcher.packets) <= PACKET_BYTES_MAX
    assert len(launcher.metrics()) > 5


def test_one_step_too_large_for_a_packet_is_dropped_and_counted(launcher: FakeLauncher, rank: Rank) -> None:
    rank.step(1, **{f"{index:04d}" + "\N{SNOWMAN}" * 100: 1.0 for index in range(SCALARS_MAX)})
    rank.step(2, loss=1.0)
    rank.reporter.tick()
    rank.reporter.tick()
    launcher.wait_for(lambda: len(launcher.metrics()) == 2)
    assert list(launcher.rows()) == [2]
    assert launcher.metrics()[-1].dropped == 1


def test_heartbeats_that_nobody_hears_do_not_push_out_steps(tmp_path: Path) -> None:
    rank = Rank(tmp_path / "nobody.sock")
    rank.step(1, loss=1.0)
    for _ in range(10):
        rank.reporter.tick()
    assert rank.socket.pending == 1


def test_log_lines_are_batched_cut_and_sent_in_order(launcher: FakeLauncher, rank: Rank) -> None:
    for number in range(250):
        rank.reporter.add_line(LogLine(at=1.0, stream="logging", text=f"{number} " + "x" * 2_000))
    rank.reporter.add_line(LogLine(at=1.0, stream="logging", text="y" * (LINE_CHARS_MAX + 5)))
    rank.reporter.tick()
    rank.socket.drain(1.0)
    launcher.wait_for(lambda: len(launcher.lines()) == 251)
    assert [line.split()[0] for line in launcher.lines()[:250]] == [str(number) for number in range(250)]
    assert launcher.lines()[-1] == "y" * LINE_CHARS_MAX + " …"
    assert [entry["sequence"] for entry in launcher.of("logs.v1")] == list(range(len(launcher.of("logs.v1"))))
    assert max(len(body) for _, body in launcher.packets) <= PACKET_BYTES_MAX


def test_a_line_that_is_no_text_is_sent_as_far_as_it_is(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.add_line(LogLine(at=1.0, stream="logging", text="caf\u00e9 \udcff"))
    rank.reporter.tick()
    launcher.wait_for(launcher.lines)
    assert launcher.lines() == ["caf\u00e9 ?"]


def test_lines_beyond_the_bound_push_out_the_oldest_and_are_counted(rank: Rank) -> None:
    for number in range(LINES_MAX + 7):
        rank.reporter.add_line(LogLine(at=1.0, stream="logging", text=str(number)))
    assert rank.reporter.dropped == 7


def test_a_fault_that_fires_is_told_with_the_time_it_fired(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.add_fault("nan", {"step": 7.0})
    rank.clock.advance(5.0)
    rank.reporter.tick()
    launcher.wait_for(lambda: launcher.of("fault_injected.v1"))
    (fault,) = launcher.of("fault_injected.v1")
    assert (fault["fault"], fault["parameters"], fault["at"], fault["rank"]) == (
        "nan",
        {"step": 7.0},
        1_000.0,
        1,
    )


def test_injections_are_handed_on_and_unknown_packets_ignored(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.tick()
    launcher.wait_for(lambda: launcher.connections)
    launcher.connections[0].send(b"tea.v1\n{}")
    launcher.connections[0].send(b"no packet at all")
    launcher.inject(fault="nan")
    rank.reporter.tick()
    assert rank.asked == [b'{"fault": "nan"}']


def test_the_thread_survives_a_mistake_of_ours_and_says_so_once(
    launcher: FakeLauncher, caplog: pytest.LogCaptureFixture
) -> None:
    rank = Rank(launcher.path)
    calls = 0

    def broken() -> Phase:
        nonlocal calls
        calls += 1
        if calls < 3:
            raise ZeroDivisionError
        return "train"

    reporter = Reporter(rank.identity, rank.rows, rank.socket, broken, SystemClock())
    reporter.start()
    launcher.wait_for(launcher.metrics)
    reporter.stop()
    assert launcher.metrics()[0].dropped == 2
    assert [record.message for record in caplog.records] == ["transom: a flush of telemetry failed; training goes on"]


def test_stopping_sends_what_is_left(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.start()
    rank.step(1, loss=1.0)
    rank.phase = "finished"
    rank.reporter.stop()
    launcher.wait_for(lambda: launcher.rows() == {1: {"loss": 1.0}})
    launcher.wait_for(lambda: launcher.metrics()[-1].phase == "finished")


def test_stopping_twice_or_before_the_start_is_harmless(rank: Rank) -> None:
    rank.reporter.stop()
    rank.reporter.stop()


def test_telemetry_that_is_dropped_on_purpose_is_lost_and_the_label_of_the_fault_is_not(
    launcher: FakeLauncher, rank: Rank
) -> None:
    rank.reporter.tick()
    rank.reporter.add_fault("drop_telemetry", {"seconds": 2.0})
    rank.reporter.drop_all(2.0)
    rank.step(1, loss=1.0)
    rank.reporter.tick()
    rank.clock.advance(2.0)
    rank.step(2, loss=1.0)
    rank.reporter.tick()
    launcher.wait_for(lambda: launcher.metrics()[-1:] and launcher.metrics()[-1].steps)
    assert list(launcher.rows()) == [2]
    assert [message.sequence for message in launcher.metrics()] == [0, 2]
    assert [fault["fault"] for fault in launcher.of("fault_injected.v1")] == ["drop_telemetry"]


def test_telemetry_that_is_held_back_comes_late_and_in_its_order(launcher: FakeLauncher, rank: Rank) -> None:
    rank.reporter.hold_back(1.5, 1.0)
    for step in range(1, 4):
        rank.step(step, loss=1.0)
        rank.reporter.tick()
        rank.clock.advance(0.5)
    assert rank.socket.pending == 0
    assert not launcher.metrics()  # of 1000.0 and 1000.5, which go at 1001.5 and 1002.0, and 1001.0 behind them
    for _ in range(2):
        rank.reporter.tick()
        rank.clock.advance(0.5)
    launcher.wait_for(lambda: len(launcher.metrics()) == 5)
    assert [message.sequence for message in launcher.metrics()] == list(range(5))
    assert [message.at for message in launcher.metrics()][:3] == [1_000.0, 1_000.5, 1_001.0]
