"""What the console shows of the ledger's rows: words, figures, tables, timelines and chart specs, without a page."""

from __future__ import annotations

import json
import math
import re
from zoneinfo import ZoneInfo

import msgspec
import pandas as pd
import pytest

from pipelines.ledger.shapes import Health, IncidentStory, JobView, LogRow, Series
from tests.simulated_ledger import FAULTS, JOB, SimulatedLedger
from ui import charts, markup, timeline, views
from ui.source import Ledger
from ui.words import (
    CLASS_WORDS,
    SEVERITIES,
    SEVERITY_MARKS,
    age_words,
    clock_words,
    culprit_words,
    local_zone,
    number_words,
    seconds_words,
)

NOW = 1_790_000_000.0


@pytest.fixture(scope="module")
def simulated() -> SimulatedLedger:
    return SimulatedLedger(NOW, faults=5)


@pytest.fixture(scope="module")
def ledger(simulated: SimulatedLedger) -> Ledger:
    return Ledger(simulated)


def story_of(simulated: SimulatedLedger, fault: str) -> IncidentStory:
    return next(
        simulated.incident(row.incident_id) for row in simulated.incidents().incidents if row.fault_class == fault
    )


def series_of(**ranks: list[float | None]) -> Series:
    lines = {
        name.removeprefix("r"): [(float(i), i, value) for i, value in enumerate(values)]
        for name, values in ranks.items()
    }
    middle = [(float(i), 1.0) for i in range(len(next(iter(ranks.values()))))]
    return Series(metric="train.compute.own", ranks=lines, median=middle, non_finite=[])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "–"), (0.0, "0.00 s"), (0.42, "0.42 s"), (3.14, "3.1 s"), (9.99, "10 s"), (59.4, "59 s"),
        (59.7, "1 min 00 s"),
        (125, "2 min 05 s"), (11_400, "3 h 10 min"), (187_200, "2 d 4 h"), (-2.0, "−2.0 s"),
    ],
)  # fmt: skip
def test_durations_read_at_a_glance(seconds: float | None, words: str) -> None:
    assert seconds_words(seconds) == words


def test_an_age_from_a_clock_ahead_of_ours_is_now() -> None:
    assert age_words(NOW + 5.0, NOW) == "now"
    assert age_words(NOW - 65.0, NOW) == "1 min 05 s ago"


def test_times_are_utc_and_the_readers_own() -> None:
    assert clock_words(1_790_000_000.0, ZoneInfo("Asia/Tokyo")) == "14:13:20 UTC · 23:13:20 local"
    assert clock_words(1_790_000_000.0, None, day=True) == "2026-09-21 14:13:20 UTC"
    assert local_zone("Etc/UTC") is None
    assert local_zone("../../etc/passwd") is None
    assert local_zone("Europe/Berlin") == ZoneInfo("Europe/Berlin")


def test_every_severity_has_a_shape_of_its_own() -> None:
    assert len(set(SEVERITY_MARKS.values())) == len(SEVERITIES)
    for severity in SEVERITIES:
        assert SEVERITY_MARKS[severity] in markup.chip(severity)
        assert severity in re.sub(r"<[^>]+>", "", markup.chip(severity))


def test_every_fault_class_has_words() -> None:
    from typing import get_args

    from detectors.verdict import FaultClass

    assert set(get_args(FaultClass)) == set(CLASS_WORDS)


def test_a_culprit_may_be_a_rank_a_node_or_unknown() -> None:
    assert culprit_words(((2, "node-1"),)) == "rank 2 on node-1"
    assert culprit_words(((None, "node-1"),)) == "node-1"
    assert culprit_words(()) == "unknown"
    assert culprit_words(tuple((rank, None) for rank in range(9))).endswith("and 5 more")
    assert number_words(0.24123, "s") == "0.2412 s"
    assert number_words(None) == "–"


def test_the_key_figures_say_what_is_open_and_how_fast_it_recovered(ledger: Ledger) -> None:
    cells = {
        figure.label: figure
        for figure in views.figures(ledger.jobs(), ledger.incidents(), [3.3, 6.7, 4.0], ledger.health(), NOW)
    }
    assert cells["Jobs running"].value == "1"
    assert cells["Open incidents"].value == "1"
    assert cells["Open incidents"].note == "■ 1 critical"
    assert cells["Goodput"].value == "87.3 %"
    assert cells["Median to recover"].value == "4.0 s"
    assert "memory" in cells["Newest checkpoint"].note


def test_the_key_figures_of_an_empty_ledger_are_dashes_not_errors() -> None:
    health = Health(status="ok", reason="", lag={"metrics": 12}, data_at=NOW)
    cells = views.figures((), (), [], health, NOW)
    assert [figure.value for figure in cells] == ["0", "0", "–", "–", "–", "now"]
    assert cells[-1].note == "12 records behind"


def test_the_stale_banner_names_the_age_and_the_command(ledger: Ledger) -> None:
    jobs, fresh = ledger.jobs(), ledger.health()
    assert views.stale_words(fresh, jobs, NOW) is None
    old = msgspec.structs.replace(fresh, data_at=NOW - 75.0)
    assert "1 min 15 s old" in (views.stale_words(old, jobs, NOW) or "")
    gone = views.stale_words(fresh, jobs, NOW, "Nobody answers.") or ""
    assert "Nobody answers." in gone
    assert "transom record" in gone
    finished = tuple(msgspec.structs.replace(job, state="finished") for job in jobs)
    assert views.stale_words(old, finished, NOW) is None, "old data are right where nothing runs any more"
    ill = msgspec.structs.replace(fresh, status="degraded", reason="the disk is full")
    assert "the disk is full" in (views.stale_words(ill, jobs, NOW) or "")


def test_jobs_in_trouble_come_first() -> None:
    def job(name: str, state: str, opened: int) -> JobView:
        return JobView(
            job=name, attempt=1, state=state, world_size=4, started_at=1.0, last_step=None, last_seen_at=None,
            goodput=None, open_incidents=opened, checkpoint=None, outcome="",
        )  # type: ignore[arg-type]  # fmt: skip

    table = views.jobs_table([job("done", "finished", 0), job("calm", "running", 0), job("ill", "running", 2)], NOW)
    assert list(table["Job"]) == ["ill", "calm", "done"]
    assert list(table["Newest checkpoint"]) == ["none yet"] * 3


def test_filters_narrow_and_empty_filters_let_everything_through(ledger: Ledger) -> None:
    rows = ledger.incidents()
    assert views.narrowed(rows, views.Filters()) == rows
    critical = views.narrowed(rows, views.Filters(severities=("critical",)))
    assert {row.fault_class for row in critical} == {"hang", "gpu_lost"}
    assert [row.fault_class for row in views.narrowed(rows, views.Filters(states=("open",)))] == ["gpu_lost"]
    assert views.narrowed(rows, views.Filters(jobs=("another",))) == ()


def test_the_incidents_table_says_severity_in_words(ledger: Ledger) -> None:
    table = views.incidents_table(ledger.incidents(), NOW)
    assert table["Severity"][0] == ["■ critical"]
    assert table["Culprit"][0] == "node-1"
    assert table["Done"][0] == "node excluded, restarted"
    assert isinstance(table["Onset"][0], pd.Timestamp)


def test_an_observed_action_is_not_told_as_done(ledger: Ledger) -> None:
    row = ledger.incidents()[0]
    assert row.action is not None
    observed = msgspec.structs.replace(row, action=msgspec.structs.replace(row.action, mode="observe"))
    assert views.action_words(observed) == "observed only: exclude and restart"
    waiting = msgspec.structs.replace(row, outcome="awaiting_approval")
    assert views.action_words(waiting).startswith("waits for approval")


def test_the_timeline_of_a_restart_goes_from_onset_to_resolved(simulated: SimulatedLedger, ledger: Ledger) -> None:
    story = story_of(simulated, "rank_lost")
    starts = ledger.starts(JOB)
    start = next(start for start in starts if start.attempt == 2)
    moments = timeline.timeline(story, starts, ledger.first_step_at(JOB, start))
    assert [moment.label for moment in moments] == [
        "Onset", "Verdict", "Decision", "Stop", "Ranks gone", "Start", "First step", "Resolved",
    ]  # fmt: skip
    assert moments[0].since is None
    assert all(moment.since is not None and moment.since >= 0 for moment in moments[1:])
    assert math.isclose(sum(moment.since or 0.0 for moment in moments), moments[-1].at - moments[0].at)
    assert timeline.recover_seconds(moments) == pytest.approx(3.3, abs=0.2)


def test_the_timeline_of_an_incident_without_an_action_still_says_onset_and_verdict(
    simulated: SimulatedLedger,
) -> None:
    story = story_of(simulated, "gpu_lost")
    bare = msgspec.structs.replace(
        story,
        actions=(),
        transitions=(),
        receipts=(),
        incident=msgspec.structs.replace(story.incident, action=None, onset_at=None, closed_at=None),
    )
    assert [moment.label for moment in timeline.timeline(bare)] == ["Onset", "Verdict"]


def test_facts_name_the_checkpoint_the_rejected_steps_and_the_steps_lost(simulated: SimulatedLedger) -> None:
    story = story_of(simulated, "nan")
    facts = dict(views.facts(story.incident, story.actions))
    resume = story.incident.action.resume_step if story.incident.action else 0
    assert facts["Checkpoint"] == f"step {resume}, from memory"
    assert facts["Rejected"] == f"checkpoints of step {story.incident.onset_step} and later"
    assert facts["Steps lost"] == str((story.incident.onset_step or 0) - (resume or 0))
    assert "nan first seen" in facts["Decided by"]


def test_evidence_shows_value_beside_peers_median_and_rule(simulated: SimulatedLedger) -> None:
    first = views.evidence_rows(story_of(simulated, "straggler"))[0]
    assert first[4:] == ("0.2412 s", "0.1489 s", "rank.own_compute", "metrics[0]@1184")
    assert views.evidence_metrics(story_of(simulated, "straggler"))[0] == "train.compute.own"
    assert views.evidence_metrics(story_of(simulated, "gpu_lost"))[0] == "train.step.duration"


def test_stacks_are_shown_as_groups_and_only_their_sentence_among_the_evidence(simulated: SimulatedLedger) -> None:
    story = story_of(simulated, "hang")
    sentence, groups = views.stack_groups(story)
    assert sentence.startswith("Rank 3 does not answer")
    assert [group[:2] for group in groups] == [
        ("3", "Ranks 0-2 in all_reduce"), ("1", "Rank 3 without an answer: process state T in do_signal_stop"),
    ]  # fmt: skip
    assert groups[0][2].split("\n")[0] == "distributed_c10d.py:all_reduce"
    assert [row[0] for row in views.evidence_rows(story)] == ["silence", "metric", "stack"]
    assert views.stack_groups(story_of(simulated, "nan")) == ("", ())


def test_the_audit_is_in_order_of_time(simulated: SimulatedLedger) -> None:
    story = story_of(simulated, "hang")
    rows = views.audit_rows(story)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert {"action: restart", "receipt: done", "state: probation"} <= {row[1] for row in rows}


def test_the_log_shows_the_culprits_lines_with_the_onset_in_sight(simulated: SimulatedLedger) -> None:
    story = story_of(simulated, "gpu_lost")
    began = views.onset(story.incident)
    lines = views.around_onset(simulated.logs(JOB, start=began - 10, end=began + 10), story.incident)
    assert {line.node for line in lines} == {"node-1"}
    assert sum(line.event_at < began for line in lines) <= views.LOG_LINES_BEFORE_MAX
    html = markup.log_lines(lines, began)
    assert html.index("onset") < html.index("t-trouble") < html.index("Xid")


@pytest.mark.parametrize(
    ("text", "trouble"),
    [
        ("Traceback (most recent call last):", True), ("loss is nan", True),
        ("torch.cuda.OutOfMemoryError: CUDA out of memory", True),
        ("step 5 loss 4.1", False), ("finance.csv loaded", False),
    ],
)  # fmt: skip
def test_error_lines_are_recognised(text: str, trouble: bool) -> None:
    assert views.is_error_line(LogRow(event_at=0.0, rank=0, node="n", stream="stderr", text=text)) is trouble


def test_text_from_outside_is_escaped_everywhere(simulated: SimulatedLedger) -> None:
    story = story_of(simulated, "rank_lost")
    evil = "<script>alert(1)</script>"
    row = msgspec.structs.replace(
        story.incident, summary=evil, job=evil, acknowledged_by=evil, incident_id=f'"{evil}', fault_class=evil
    )
    line = LogRow(event_at=NOW, rank=0, node=evil, stream=evil, text=evil)
    pages = [
        markup.incident_head(row, NOW, None), markup.incident_cards([row], NOW), markup.banner(evil),
        markup.empty(evil, evil, evil), markup.table([evil], [[evil]], evil), markup.facts_list([(evil, evil)]),
        markup.log_lines([line], NOW), markup.chip(evil), markup.culprit_list(row),
        markup.timeline_strip([timeline.Moment(evil, NOW, 1.0, evil)], None, NOW, going_on=True),
    ]  # fmt: skip
    assert all("<script" not in page for page in pages)


def test_a_link_to_an_incident_survives_any_id() -> None:
    assert markup.incident_href("a/b?c=d&e#1") == "incident?id=a%2Fb%3Fc%3Dd%26e%231"


def test_the_chart_breaks_a_line_where_a_restart_takes_the_step_back() -> None:
    frame = charts.rank_frame([(1.0, 1, 5.0), (2.0, 2, 5.0), (9.0, 1, 5.0)])
    assert list(frame["value"].isna()) == [False, False, True, False]
    assert frame["at"].is_monotonic_increasing


def test_nan_samples_leave_a_gap_and_a_mark() -> None:
    series = msgspec.structs.replace(series_of(r0=[1.0, None, None]), non_finite=[(0, 1, "nan"), (0, 2, "nan")])
    assert list(charts.rank_frame(series.ranks["0"])["value"].isna()) == [False, True, True]
    marks = charts.non_finite_marks(series)
    assert [(mark.at, mark.label) for mark in marks] == [(1.0, "NaN on rank 0, step 1")]
    spread = msgspec.structs.replace(series, non_finite=[(1, 2, "nan"), (0, 1, "nan"), (2, 2, "nan")])
    assert [mark.label for mark in charts.non_finite_marks(spread)] == ["NaN on rank 0, step 1, then on 2 more"]


def test_the_band_is_the_peers_range_and_breaks_where_nobody_spoke() -> None:
    points = [float(i) for i in range(20)] + [float(i) for i in range(60, 80)]
    peers = {rank: [(at, None, 1.0 + rank) for at in points] for rank in range(3)}
    frame = charts.band_frame(peers)
    assert set(frame["low"].dropna()) == {1.0}
    assert set(frame["width"].dropna()) == {2.0}
    assert frame["low"].isna().sum() == 1


def test_a_one_sample_spike_of_a_culprit_stays_in_the_spec() -> None:
    series = series_of(r0=[1.0] * 500, r1=[1.0] * 250 + [9.0] + [1.0] * 249)
    spec = charts.series_chart(series, culprits=frozenset({1}))
    assert max(dataset["source"]["value"].max() for dataset in spec["dataset"] if "value" in dataset["source"]) == 9.0
    assert all("sampling" not in line for line in spec["series"])


def test_the_culprit_is_drawn_last_thick_and_named() -> None:
    spec = charts.series_chart(series_of(r0=[1.0], r1=[1.0], r2=[1.0]), culprits=frozenset({1}))
    names = [line["name"] for line in spec["series"] if line["name"].startswith("rank")]
    assert names == ["rank 0", "rank 2", "rank 1 (culprit)"]
    assert spec["animation"] is False
    widths = {line["name"]: line["lineStyle"]["width"] for line in spec["series"] if "lineStyle" in line}
    assert widths["rank 1 (culprit)"] > widths["rank 0"]


def test_many_ranks_draw_the_culprits_and_the_farthest_only() -> None:
    ranks = {f"r{rank}": [1.0, 1.0] for rank in range(64)} | {"r40": [3.0, 3.0]}
    shown = charts.ranks_shown(series_of(**ranks), frozenset({7}), ())
    assert len(shown) == charts.RANK_LINES_MAX
    assert shown[-1] == 7
    assert 40 in shown
    assert charts.ranks_shown(series_of(**ranks), frozenset({7}), (3, 5)) == (3, 5)


def test_spans_and_restarts_stand_in_the_spec_as_plain_json(simulated: SimulatedLedger, ledger: Ledger) -> None:
    story = story_of(simulated, "hang")
    starts = ledger.starts(JOB)
    moments = timeline.timeline(story, starts)
    start, end = timeline.chart_window(story.incident, moments, NOW)
    assert start < views.onset(story.incident) < end
    series = ledger.series(JOB, "train.step.duration", place="", start=start, end=end)
    spec = charts.series_chart(
        series,
        culprits=views.culprit_ranks(story.incident, series),
        spans=[timeline.incident_span(story.incident, moments)],
        marks=timeline.restart_marks(starts),
        start=start,
        end=end,
    )
    bare = {**spec, "dataset": []}
    assert json.loads(json.dumps(bare, allow_nan=False)) == bare
    last = spec["series"][-1]
    assert last["markArea"]["data"][0][0]["xAxis"] == round(views.onset(story.incident) * 1000)
    assert [line["name"] for line in last["markLine"]["data"]] == [f"attempt {n}" for n in (2, 3, 4, 5)]


def test_a_fault_that_goes_on_reaches_to_the_end_of_the_chart() -> None:
    series = series_of(r0=[1.0, 1.0])
    spec = charts.series_chart(series, spans=[charts.Span(0.5, None, "Hang")], start=0.0, end=9.0)
    assert spec["series"][-1]["markArea"]["data"][0][1]["xAxis"] == 9_000


def test_an_empty_series_makes_a_spec_and_words() -> None:
    series = Series(metric="train.loss", ranks={}, median=[], non_finite=[])
    assert charts.series_chart(series)["series"]
    assert charts.step_time_chart(series, spans=[], marks=[], start=None, end=None)["series"]
    assert charts.chart_words(series, frozenset()) == "Loss: no samples in this stretch of time."
    assert charts.non_finite_marks(series) == ()


def test_the_chart_is_told_in_words_for_who_cannot_see_it(ledger: Ledger) -> None:
    words = charts.chart_words(ledger.series(JOB, "train.compute.own", place=""), frozenset({1}))
    assert words.startswith("Own compute of 4 ranks over time")
    assert "Rank 1, the culprit" in words


def test_while_the_ledger_is_away_its_last_answers_stand_and_the_reason_is_known() -> None:
    reader = SimulatedLedger(NOW, faults=2)
    source = Ledger(reader)
    jobs = source.jobs()
    reader.away = True
    assert source.jobs() == jobs
    assert "Nobody answers" in source.away
    reader.away = False
    source.jobs()
    assert source.away == ""


def test_the_remembered_answers_are_bounded() -> None:
    from ui.source import ANSWERS_MAX

    source = Ledger(SimulatedLedger(NOW, faults=1))
    for number in range(ANSWERS_MAX + 20):
        source.metric_names(f"job-{number}")
    assert len(source._answers) == ANSWERS_MAX


def test_two_charts_do_not_share_a_remembered_answer() -> None:
    reader = SimulatedLedger(NOW, faults=2)
    source = Ledger(reader)
    whole = source.series(JOB, "train.loss", place="overview")
    source.series(JOB, "train.loss", place="incident", start=NOW - 5.0, end=NOW)
    reader.away = True
    assert source.series(JOB, "train.loss", place="overview") == whole


def test_noise_alone_is_drawn_from_zero_and_an_outlier_is_not_squeezed() -> None:
    calm = charts.series_chart(series_of(r0=[1.0, 1.05], r1=[1.02, 0.98]))
    slow = charts.series_chart(series_of(r0=[1.0, 1.0], r1=[1.0, 1.6]))
    assert calm["yAxis"]["scale"] is False
    assert slow["yAxis"]["scale"] is True


def test_many_ranks_are_asked_for_in_fewer_buckets() -> None:
    from ui.source import SAMPLES_MAX, buckets_for

    assert buckets_for(4) == 400
    assert buckets_for(256) * 256 <= SAMPLES_MAX
    assert buckets_for(100_000) == 40


def test_the_simulation_tells_the_demos_six_faults() -> None:
    rows = SimulatedLedger(NOW).incidents().incidents
    assert [row.fault_class for row in rows] == list(FAULTS)
    assert SimulatedLedger(NOW).jobs()[0].state == "failed"
