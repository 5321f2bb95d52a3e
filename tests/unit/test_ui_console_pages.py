"""Recovery, checkpoints, pipeline and rules pages, roles and bundles, headless over a simulated ledger."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from ingest.clock import ManualClock
from ingest.codec import Codec
from ingest.events import CheckpointEvent, Metrics, Topic
from pipelines.ledger.shapes import Row, RowPage, Series
from pipelines.replay_ledger import write_ledger
from pipelines.replay_source import placed
from recovery.action import RECOVERY_TYPES, Command
from tests.simulated_ledger import JOB, SimulatedLedger
from ui import access, bundle, checkpoint_views, deviations, recovery_views, shell

APP = Path(__file__).parents[2] / "ui" / "entry" / "app.py"
NOW = 1_790_000_000.0
HANG = f"{JOB}/2/hang/3"


class LedgerWithRows(SimulatedLedger):
    """The simulated story, with the lists that the audit and the checkpoints page ask for."""

    def rows(self, table: str, *, job: str | None = None, **more: object) -> RowPage:
        self._check()
        if table == "events":
            return super().rows(table, job=job)
        stories = [self.incident(name) for name in self._stories]
        if table == "checkpoints":
            messages: list[object] = [event for event in self.messages() if isinstance(event, CheckpointEvent)]
        elif table == "commands":
            messages = [msgspec.convert(row, Command) for row in self.commands]
        else:
            messages = [one for story in stories for one in getattr(story, table)]
        return RowPage(rows=tuple(Row(seq=n, kind=table, message=one) for n, one in enumerate(messages)), next=0)


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[LedgerWithRows]:
    reader = LedgerWithRows(NOW, faults=5)
    monkeypatch.setattr(shell, "connect", lambda _where: reader)
    monkeypatch.setattr(shell, "CLOCK", ManualClock(NOW))
    st.cache_resource.clear()
    yield reader
    st.cache_resource.clear()


def console(page: str, **query: str | list[str]) -> AppTest:
    app = AppTest.from_file(str(APP), default_timeout=60)
    for name, value in query.items():
        app.query_params[name] = value
    app.switch_page(f"../pages/{page}.py")
    return app.run()


def html(app: AppTest) -> str:
    return "\n".join(element.proto.body for element in app.get("html"))


def test_the_recovery_page_tells_intent_result_and_excluded_nodes(simulated: LedgerWithRows) -> None:
    app = console("recovery")
    assert not app.exception
    page = html(app)
    for part in ("intent: restart", "result: done", "state: resolved", "node-1", "a spare is free"):
        assert part in page, part


def test_a_waiting_plan_is_approved_by_its_hash_once_name_and_confirmation_are_there(simulated: LedgerWithRows) -> None:
    simulated._stories[HANG]["incident"]["outcome"] = "awaiting_approval"
    app = console("recovery")
    assert app.button(key=f"approve-{HANG}").disabled
    app.text_input(key=f"author-{HANG}").set_value("mira").run()
    assert app.button(key=f"approve-{HANG}").disabled
    app.checkbox(key=f"sure-{HANG}").set_value(True).run()
    app.button(key=f"approve-{HANG}").click().run()
    sent = simulated.commands[-1]
    assert (sent["verb"], sent["incident_id"], sent["plan_hash"], sent["author"]) == ("approve", HANG, "9f2c", "mira")


def test_a_job_is_commanded_only_once_its_name_was_typed(simulated: LedgerWithRows) -> None:
    app = console("recovery")
    app.selectbox(key="verb").set_value("unexclude").run()
    app.text_input(key="author").set_value("mira").run()
    app.text_input(key="node").set_value("node-1").run()
    assert app.button(key="send").disabled
    app.text_input(key="confirm").set_value(JOB).run()
    app.button(key="send").click().run()
    sent = simulated.commands[-1]
    assert (sent["verb"], sent["job"], sent["node"], sent["incident_id"]) == ("unexclude", JOB, "node-1", "")


def test_a_node_that_was_given_back_is_not_left_out_any_more(simulated: LedgerWithRows) -> None:
    actions = simulated.rows("actions").rows
    assert [node for node, _ in recovery_views.excluded(actions, ())] == ["node-1"]
    command = Command(
        command_id="c", job=JOB, at=NOW + 1.0, verb="unexclude", incident_id="", author="m", node="node-1"
    )
    assert recovery_views.excluded(actions, (Row(seq=1, kind="command.v1", message=command),)) == ()


def test_the_checkpoints_page_says_from_where_the_job_would_go_on(simulated: LedgerWithRows) -> None:
    app = console("checkpoints")
    assert not app.exception
    newest = simulated.last_step // 10 * 10
    assert app.metric[0].value == f"step {newest:,}"
    assert "✓ complete" in html(app)


def test_a_rejected_step_is_passed_over_and_shards_are_counted() -> None:
    def event(step: int, state: str, rank: int = -1, tier: str = "memory", size: int = 0, attempt: int = 1) -> Row:
        reason = "a flip" if state == "rejected" else ""
        fields = {
            "job": JOB, "attempt": attempt, "rank": rank, "node": "n", "sequence": 0, "at": NOW, "state": state,
            "step": step, "tier": tier, "size_bytes": size, "reason": reason,
        }  # fmt: skip
        return Row(seq=step, kind="checkpoint.v1", message=msgspec.convert(fields, CheckpointEvent))

    rows = [event(10, "complete"), event(10, "durable", 0, "disk", 1 << 30), event(20, "complete"),
            event(20, "rejected"), event(30, "sealed", 0, attempt=2), event(30, "sealed", 1, attempt=2)]  # fmt: skip
    steps = checkpoint_views.steps_of(rows)
    best = checkpoint_views.restorable(steps)
    assert best is not None
    assert best.step == 10
    table = checkpoint_views.table_rows(steps, NOW + 5.0)
    assert table[0][1:3] == ("… not complete", "2 shards")
    assert table[1][1] == "✕ rejected"
    assert "a flip" in table[1][-1]
    assert table[2][6] == "1 GiB"


def test_a_rejection_is_of_all_later_steps_too_until_they_are_saved_anew() -> None:
    def event(step: int, state: str, attempt: int) -> Row:
        fields = {
            "job": JOB, "attempt": attempt, "rank": -1, "node": "n", "sequence": 0, "at": NOW, "state": state,
            "step": step, "tier": "disk", "reason": "",
        }  # fmt: skip
        return Row(seq=step, kind="checkpoint.v1", message=msgspec.convert(fields, CheckpointEvent))

    saved = [event(130, "complete", 3), event(135, "complete", 3), event(140, "complete", 3)]
    steps = checkpoint_views.steps_of([*saved, event(133, "rejected", 3)])
    assert [(one.step, one.rejected) for one in steps] == [(140, True), (135, True), (130, False)]
    steps = checkpoint_views.steps_of([*saved, event(133, "rejected", 3), event(135, "complete", 4)])
    assert [one.step for one in steps if one.rejected] == [140]
    steps = checkpoint_views.steps_of([*saved, event(140, "evicted", 3)])
    assert steps[0].state == "○ let go"


def test_the_pipeline_and_rules_pages_are_drawn(simulated: LedgerWithRows) -> None:
    app = console("health")
    assert not app.exception
    assert app.metric[0].value == "✓ ok"
    rules = console("rules", q="xid")
    assert not rules.exception
    page = html(rules)
    assert "xid" in page.lower()
    assert "exclude and restart" in page


def test_several_incidents_are_acknowledged_and_muted_together(simulated: LedgerWithRows) -> None:
    names = list(simulated._stories)[:2]
    app = console("incidents", selected=names)
    app.text_input(key="author").set_value("mira").run()
    app.button(key="acknowledge").click().run()
    app.button(key="mute").click().run()
    sent = [(row["verb"], row["incident_id"]) for row in simulated.commands]
    assert sorted(sent) == sorted([(verb, name) for verb in ("acknowledge", "mute") for name in names])
    assert simulated.commands[-1]["until"] == NOW + 3_600.0


def test_the_detail_page_draws_ranks_by_time_and_says_who_stands_out(simulated: LedgerWithRows) -> None:
    app = console("incident", id=f"{JOB}/1/straggler/1", metric="train.compute.own")
    assert not app.exception
    alts = [element.proto.alt for element in app.get("echarts_chart")]
    assert any("Rank 1 stands out most" in alt for alt in alts)
    assert "1 (culprit)" in html(app)
    assert "rank.own_compute" in html(app)


def test_of_many_ranks_the_picture_shows_those_that_stand_out_and_the_culprits() -> None:
    values = {rank: 9.0 if rank == 700 else 1.0 for rank in range(1_024)}
    ranks: dict[str, list[tuple[float, int, float | None]]] = {
        str(rank): [(NOW + step, step, value) for step in range(30)] for rank, value in values.items()
    }
    series = Series(metric="train.compute.own", ranks=ranks, median=[], non_finite=[])
    grid = deviations.grid_of(series)
    assert grid is not None
    found = deviations.deviations(grid)
    shown = deviations.shown_ranks(found, frozenset({3}))
    assert found[0].rank == 700
    assert len(shown) == deviations.RANKS_MAX
    assert {3, 700} <= set(shown)


@pytest.mark.parametrize("worst", [1.1, 1.6, 40.0])
def test_what_is_like_its_peers_has_the_middle_colour_however_far_the_others_are(worst: float) -> None:
    ranks: dict[str, list[tuple[float, int, float | None]]] = {
        str(rank): [(NOW + step, step, worst if rank == 2 else 1.0) for step in range(30)] for rank in range(4)
    }
    series = Series(metric="train.compute.own", ranks=ranks, median=[], non_finite=[])
    grid = deviations.grid_of(series)
    assert grid is not None
    scale = deviations.heatmap(series, grid, (0, 1, 2, 3))["visualMap"]
    assert (scale["min"] + scale["max"]) / 2.0 == pytest.approx(1.0)
    assert len(scale["inRange"]["color"]) % 2 == 1


def test_a_bundle_is_a_zip_with_story_series_and_log_and_the_same_bytes_again(simulated: LedgerWithRows) -> None:
    story = simulated.incident(HANG)
    series, lines = simulated.series(JOB, "train.loss"), simulated.logs(JOB)
    packed = bundle.bundle(story, series, lines)
    assert packed == bundle.bundle(story, series, lines)
    with zipfile.ZipFile(io.BytesIO(packed)) as archive:
        assert msgspec.json.decode(archive.read("incident.json"))["incident"]["incident_id"] == HANG
        assert archive.read("series.csv").startswith(b"rank,event_at,step,train.loss\n0,")
        assert len(archive.read("log.jsonl").splitlines()) == len(lines)
    assert "/" not in bundle.file_name(HANG)


def test_a_viewer_sees_everything_and_commands_nothing(
    simulated: LedgerWithRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_CONSOLE_TOKEN", "an-operators-token")
    monkeypatch.setenv("TRANSOM_CONSOLE_VIEWER_TOKEN", "a-viewers-token--")
    app = console("incidents", selected=HANG)
    app.text_input[0].set_value("a-viewers-token--").run()
    app.text_input(key="author").set_value("mira").run()
    assert "Rank 3 on node-1 is stopped" in html(app)
    assert app.button(key="acknowledge").disabled
    assert app.button(key="mute").disabled
    assert simulated.commands == []


def test_a_command_is_refused_where_it_is_sent_and_not_only_where_its_button_is(
    simulated: LedgerWithRows, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_LEDGER_FOLDER", "/a/finished/one")
    said: list[str] = []
    monkeypatch.setattr(st, "error", said.append)
    sent: list[str] = []

    def send() -> str:
        sent.append("sent")
        return ""

    shell.tell(send, "done")
    assert not sent
    assert len(said) == 1
    assert "finished" in said[0]


def test_roles_come_from_tokens_and_an_empty_token_is_nobodys() -> None:
    assert access.role_of("operator", "operator", "viewer") == "operator"
    assert access.role_of("viewer", "operator", "viewer") == "viewer"
    assert access.role_of("other", "operator", "viewer") is None
    assert access.role_of("", "operator", "") is None
    assert access.role_of("", "", "") is None


def test_a_finished_ledger_is_opened_read_only_and_its_clock_stands_at_its_newest_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "replayed"
    codec, offsets = Codec(RECOVERY_TYPES), dict[Topic, int]()
    told = [one for one in SimulatedLedger(NOW, faults=5).messages() if not isinstance(one, Metrics)]
    records = [placed(codec.encode(one), offsets, one.at) for one in told]
    write_ledger(folder, records, (), ManualClock(NOW))
    monkeypatch.setenv("TRANSOM_LEDGER_FOLDER", str(folder))
    monkeypatch.setattr(shell, "CLOCK", ManualClock(NOW + 90 * 86_400.0))
    st.cache_resource.clear()
    app = console("incidents")
    assert not app.exception
    assert len(app.dataframe[0].value) == 5
    assert "d " not in str(app.dataframe[0].value["Age"][0]), "ages are of the recording's clock"
    st.cache_resource.clear()
