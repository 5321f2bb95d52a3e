"""The console's pages run headless over a simulated ledger: what they show, what the URL keeps, what buttons send."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from ingest.clock import ManualClock
from tests.simulated_ledger import JOB, SimulatedLedger
from ui import shell
from ui.source import Address, LedgerAway, connect

UI = Path(__file__).parents[2] / "ui"
APP = UI / "entry" / "app.py"
NOW = 1_790_000_000.0
HANG = f"{JOB}/2/hang/3"


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedLedger]:
    reader = SimulatedLedger(NOW, faults=5)
    monkeypatch.setattr(shell, "connect", lambda _where: reader)
    monkeypatch.setattr(shell, "CLOCK", ManualClock(NOW))
    st.cache_resource.clear()
    yield reader
    st.cache_resource.clear()


def console(page: str = "", **query: str | list[str]) -> AppTest:
    app = AppTest.from_file(str(APP), default_timeout=30)
    for name, value in query.items():
        app.query_params[name] = value
    if page:
        app.switch_page(f"../pages/{page}.py")
    return app.run()


def html(app: AppTest) -> str:
    return "\n".join(element.proto.body for element in app.get("html"))


def charts(app: AppTest) -> list[str]:
    return [element.proto.alt for element in app.get("echarts_chart")]


def test_the_overview_shows_figures_jobs_incidents_and_a_chart(simulated: SimulatedLedger) -> None:
    app = console()
    assert not app.exception
    figures = {metric.label: metric.value for metric in app.metric}
    assert figures["Open incidents"] == "1"
    assert figures["Median to recover"].endswith(" s")
    assert app.dataframe[0].value["State"][0] == "▶ running"
    assert "GPU lost" in html(app)
    assert "5 incidents and 4 restarts are marked" in charts(app)[0]


def test_the_incidents_page_takes_its_filters_from_the_url(simulated: SimulatedLedger) -> None:
    app = console("incidents", severity=["critical"])
    assert not app.exception
    assert list(app.dataframe[0].value["Class"]) == ["GPU lost", "Hang"]
    app.multiselect(key="class").set_value(["hang"]).run()
    assert list(app.dataframe[0].value["Class"]) == ["Hang"]
    assert app.query_params["class"] == "hang"
    app.multiselect(key="class").set_value([]).run()
    assert "class" not in app.query_params


def test_filters_that_nothing_passes_say_so(simulated: SimulatedLedger) -> None:
    assert "Nothing passes these filters" in html(console("incidents", severity=["info"]))


def test_the_selected_incident_is_kept_by_its_id_when_a_new_one_appears_above(
    simulated: SimulatedLedger,
) -> None:
    newest = next(iter(reversed(simulated._stories)))
    hidden = simulated._stories.pop(newest)
    app = console("incidents", selected=HANG)
    assert "Rank 3 on node-1 is stopped" in html(app)
    simulated._stories[newest] = hidden
    app.run()
    assert len(app.dataframe[0].value) == 5
    assert "Rank 3 on node-1 is stopped" in html(app)
    assert app.query_params["selected"] == HANG


def test_acknowledging_from_the_list_needs_a_name_and_is_sent(simulated: SimulatedLedger) -> None:
    app = console("incidents", selected=HANG)
    assert app.button(key="acknowledge").disabled
    app.text_input(key="author").set_value("mira").run()
    app.button(key="acknowledge").click().run()
    assert [(row["verb"], row["incident_id"], row["author"]) for row in simulated.commands] == [
        ("acknowledge", HANG, "mira")
    ]


def test_the_detail_page_shows_sentence_timeline_series_evidence_log_and_audit(simulated: SimulatedLedger) -> None:
    app = console("incident", id=HANG)
    assert not app.exception
    page = html(app)
    for part in (
        "Rank 3 on node-1 is stopped", "■</i>critical", "Ranks gone", "First step",
        "hang.corroborated", 'class="t-trouble"', "Ranks 0-2 in all_reduce", "c10d_logger.py:wrapper",
        "receipt: done", "step 400, from memory",
    ):  # fmt: skip
        assert part in page, part
    assert "Rank 3, the culprit" in charts(app)[0]


def test_the_detail_page_keeps_metric_and_ranks_in_the_url(simulated: SimulatedLedger) -> None:
    app = console("incident", id=HANG, metric="train.loss", ranks=["1", "3"])
    assert charts(app)[0].startswith("Loss of 4 ranks")
    assert app.multiselect(key="ranks").value == [1, 3]
    app.selectbox(key="metric").set_value("train.collective.wait").run()
    assert app.query_params["metric"] == "train.collective.wait"
    assert app.query_params["id"] == HANG


def test_feedback_carries_name_note_and_judgement(simulated: SimulatedLedger) -> None:
    app = console("incident", id=HANG)
    app.text_input(key="author").set_value("mira").run()
    app.text_area(key="note").set_value("the power cap test").run()
    app.button(key="feedback-false_positive").click().run()
    sent = simulated.commands[-1]
    assert (sent["verb"], sent["feedback"], sent["note"]) == ("feedback", "false_positive", "the power cap test")
    assert "verdict judged: false positive" in html(app)


def test_a_plan_that_waits_for_a_person_can_be_approved_with_its_hash(simulated: SimulatedLedger) -> None:
    simulated._stories[HANG]["incident"]["outcome"] = "awaiting_approval"
    app = console("incident", id=HANG)
    app.text_input(key="author").set_value("mira").run()
    app.button(key="approve").click().run()
    assert (simulated.commands[-1]["verb"], simulated.commands[-1]["plan_hash"]) == ("approve", "9f2c")


def test_an_unknown_id_and_no_id_are_sentences(simulated: SimulatedLedger) -> None:
    assert "No such incident" in html(console("incident", id="nobody"))
    assert "No incident chosen" in html(console("incident"))


def test_the_job_page_explores_any_metric(simulated: SimulatedLedger) -> None:
    app = console("job", metric="train.gradient.local_norm")
    assert not app.exception
    assert charts(app)[0].startswith("Local gradient norm of 4 ranks")
    assert "checkpoint of step 280" in html(app)


def test_a_ledger_that_goes_away_leaves_the_page_and_a_banner(simulated: SimulatedLedger) -> None:
    app = console()
    simulated.away = True
    shell.CLOCK.advance(30.0)  # type: ignore[attr-defined]
    app.run()
    assert not app.exception
    assert "What you see is 30 s old" in html(app)
    assert "transom record" in html(app)
    assert app.metric[0].value == "1"
    simulated.away = False
    simulated.now += 30.0
    app.run()
    assert 'class="t-banner"' not in html(app)


def test_a_ledger_that_was_never_there_is_an_empty_state_with_the_command(simulated: SimulatedLedger) -> None:
    simulated.away = True
    for page in ("", "incidents", "incident", "job"):
        app = console(page, id=HANG)
        assert not app.exception
        assert "transom up" in html(app), page


def test_an_empty_ledger_says_what_to_do_next(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = SimulatedLedger(NOW, faults=0)
    monkeypatch.setattr(shell, "connect", lambda _where: reader)
    monkeypatch.setattr(shell, "CLOCK", ManualClock(NOW))
    st.cache_resource.clear()
    assert "transom inject" in html(console())
    monkeypatch.setattr(reader, "jobs", lambda: ())
    st.cache_resource.clear()
    assert "transom demo" in html(console())


def test_a_console_without_an_address_says_how_to_start_it() -> None:
    with pytest.raises(LedgerAway, match="transom console"):
        connect(Address())


def test_a_console_for_others_asks_for_its_token(simulated: SimulatedLedger, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_CONSOLE_TOKEN", "a-token-of-some-length")
    for page in ("incidents", "incident", "job"):
        deep = console(page, id=HANG)
        assert "Rank 3" not in html(deep)
        assert len(deep.text_input) == 1
    app = console()
    assert not app.metric
    app.text_input[0].set_value("wrong").run()
    assert not app.metric
    assert "not the token" in app.error[0].value
    app.text_input[0].set_value("a-token-of-some-length").run()
    assert app.metric


def test_a_page_that_is_reached_past_the_entry_still_shows_nothing_without_the_token(
    simulated: SimulatedLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_CONSOLE_TOKEN", "a-token-of-some-length")
    app = AppTest.from_file(str(UI / "pages" / "overview.py"), default_timeout=30).run()
    assert not app.metric
    assert "asks for a token" in html(app)


def test_no_folder_of_pages_lies_beside_the_started_file() -> None:
    """Streamlit would serve it by itself, without our entry, to whoever comes first by a deep link."""
    assert not (APP.parent / "pages").exists()


def test_no_file_of_ui_shadows_a_room_a_dependency_or_the_standard_library() -> None:
    import sys
    from importlib.metadata import packages_distributions

    rooms = {"ingest", "detectors", "recovery", "ckpt_engine", "pipelines", "ui", "transom", "data", "tests"}
    known = rooms | set(sys.stdlib_module_names) | set(packages_distributions())
    names = {path.stem for path in [*UI.glob("*.py"), *UI.glob("entry/*.py")]} - {"__init__"}
    assert not names & known
