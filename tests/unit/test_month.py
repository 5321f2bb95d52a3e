"""The simulated month: the arithmetic gives the published table, the real code gives months, and both can be seen."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.month.assumptions import FLEETS, OURS, Assumptions, Fleet, Human
from pipelines.month.closed_form import POLICIES, month_of
from pipelines.month.real_policy import RealMonth, month_config, real_month
from pipelines.month.report import svg_of
from pipelines.month.result import Month, reaction_seconds, summary_of
from pipelines.month.simulated_cluster import SimulatedCheckpoints, SimulatedCluster
from recovery.backend import Conflict, Rejected, StartRequest, TooFewNodes

SMALL = Fleet("small", 256, 5 * 3_600.0)
MONTHS = 40
# Means of 200 months, from which those of 40 may lie apart by chance: (goodput, pages).
TABLE = {
    ("nobody", "1k"): (0.594, 66), ("torchrun", "1k"): (0.669, 50), ("requeue", "1k"): (0.870, 17),
    ("ours", "1k"): (0.962, 4.3), ("ours_in_memory", "1k"): (0.971, 4.3),
    ("nobody", "16k"): (0.190, 160), ("torchrun", "16k"): (0.248, 139), ("requeue", "16k"): (0.602, 57),
    ("ours", "16k"): (0.863, 17), ("ours_in_memory", "16k"): (0.896, 18),
}  # fmt: skip


@pytest.mark.parametrize(("policy", "fleet"), TABLE)
def test_the_arithmetic_gives_the_published_table(policy: str, fleet: str) -> None:
    months = [month_of(POLICIES[policy], FLEETS[fleet], Assumptions(), seed) for seed in range(MONTHS)]
    summary = summary_of(months)
    goodput, pages = TABLE[policy, fleet]
    assert summary.goodput == pytest.approx(goodput, abs=0.015)
    assert summary.pages == pytest.approx(pages, rel=0.12, abs=0.8)


def test_people_are_slow_at_night() -> None:
    human = Human(sigma=0.0)
    assert reaction_seconds(human, 10 * 3_600.0, Random(1)) == 1_200.0
    assert reaction_seconds(human, 86_400.0 + 3 * 3_600.0, Random(1)) == 9_000.0


def week(seed: int, **overrides: float) -> Month:
    return real_month("real", SMALL, OURS, Assumptions(days=7, **overrides), seed)


def test_a_week_under_the_real_policy_is_near_the_arithmetic() -> None:
    weeks = [week(seed) for seed in range(2)]
    arithmetic = summary_of([month_of(POLICIES["ours"], SMALL, Assumptions(days=7), seed) for seed in range(MONTHS)])
    assert summary_of(weeks).goodput == pytest.approx(arithmetic.goodput, abs=0.04)
    assert all(month.restarts >= month.failures - month.pages for month in weeks)
    assert all(later[0] >= earlier[1] for month in weeks for earlier, later in pairwise(month.down))


def test_the_same_seed_is_the_same_week() -> None:
    assert week(3) == week(3)


def only(kind: str) -> dict[str, float]:
    return {name: float(name == kind) for name in Assumptions().shares}


def test_no_person_is_needed_where_only_machines_fail() -> None:
    shares = {**only("bad_node_crash"), "transient_crash": 0.5, "hang_transient": 0.2}
    given = Assumptions(days=5, shares=shares, spare_share=1.0)
    month = real_month("real", SMALL, OURS, given, 1)
    assert month.failures > 10
    assert month.pages == 0


def test_every_bug_of_the_users_is_a_page_and_is_restarted_a_few_times_at_most() -> None:
    given = Assumptions(days=5, shares=only("user_bug"))
    month = real_month("real", SMALL, OURS, given, 1)
    assert month.pages == month.failures > 3
    assert month.restarts <= 4 * month.failures


def test_an_excluded_node_is_not_used_while_it_is_broken(tmp_path: Path) -> None:
    given = Assumptions(days=5, shares=only("bad_node_crash"), wrong_culprit=0.0, spare_share=1.0)
    world = RealMonth("real", SMALL, OURS, given, 2, tmp_path, month_config(OURS))
    month = world.run()
    assert month.restarts == month.failures > 10, (
        "the first restart is without the bad node, or there would be a second"
    )


def cluster() -> SimulatedCluster:
    nodes = {f"n{number}": False for number in range(4)}
    made = SimulatedCluster(nodes, lambda job: 7, lambda job, request: None)
    made.add_job("job", 3)
    made.start(StartRequest("job", 1, "first"))
    return made


def test_the_cluster_keeps_the_promises_of_a_backend() -> None:
    backend = cluster()
    with pytest.raises(Conflict, match="still live"):
        backend.start(StartRequest("job", 2, "second"))
    assert backend.stop("job", 1, grace_seconds=0.0, deadline_seconds=0.0)
    assert backend.observe("job").phase == "stopped"
    seen = backend.start(StartRequest("job", 2, "second", excluded_nodes=("n0",)))
    assert [rank.node for rank in seen.ranks] == ["n3", "n1", "n2"], "survivors keep their ranks"
    assert backend.start(StartRequest("job", 2, "second")).token == "second"
    with pytest.raises(Conflict, match="not newer"):
        backend.start(StartRequest("job", 1, "late"))
    backend.stop("job", 2, grace_seconds=0.0, deadline_seconds=0.0)
    with pytest.raises(TooFewNodes):
        backend.start(StartRequest("job", 3, "third", excluded_nodes=("n1",)))
    backend.finish("job", "failed", "")
    with pytest.raises(Rejected, match="terminal stays terminal"):
        backend.start(StartRequest("job", 4, "fourth"))
    with pytest.raises(Rejected, match="no job"):
        backend.observe("other")


def test_a_dead_rank_is_a_failed_job_and_a_stopped_one_is_not() -> None:
    backend = cluster()
    backend.break_rank("job", "n1", "stopped")
    assert (backend.observe("job").phase, backend.observe("job").step) == ("running", 7)
    backend.break_rank("job", "n2", "exited")
    assert backend.observe("job").phase == "failed"


def test_checkpoints_before_a_bad_step_are_chosen() -> None:
    checkpoints = SimulatedCheckpoints(10, lambda job: 95)
    assert checkpoints.newest_complete("job", before_step=None, places=[]).step == 90  # type: ignore[union-attr]
    assert checkpoints.newest_complete("job", before_step=90, places=[]).step == 80  # type: ignore[union-attr]
    checkpoints.reject_from("job", 41, 1, "nan")
    assert checkpoints.newest_complete("job", before_step=None, places=[]).step == 40  # type: ignore[union-attr]
    assert checkpoints.newest_complete("job", before_step=5, places=[]) is None


def test_the_plot_is_a_picture_whose_bars_are_the_shares() -> None:
    month = Month("a & b", "1k", 100.0, useful_seconds=80.0, down=[(0.0, 15.0)])
    tree = ElementTree.fromstring(svg_of([summary_of([month])], "title"))
    bars = [float(rect.get("width", "0")) for rect in tree.iter("{http://www.w3.org/2000/svg}rect")][-3:]
    assert bars == [pytest.approx(384.0), pytest.approx(24.0), pytest.approx(72.0)]


def test_the_command_alone_is_the_month(tmp_path: Path) -> None:
    figures, plot = tmp_path / "month.json", tmp_path / "month.svg"
    arguments = ["simulate", "--gpus", "256", "--mttf-hours", "5", "--days", "2", "--months", "1", "--processes", "1"]
    result = CliRunner().invoke(app, [*arguments, "--json", str(figures), "--plot", str(plot)])
    assert result.exit_code == 0, result.output
    tree = json.loads(figures.read_text())
    assert len(tree["months"]) == len(POLICIES) + 2
    assert plot.read_text().startswith("<svg")
    assert "--gpus" in str(CliRunner().invoke(app, ["simulate", "month", "--gpus", "256"]).exception)
    assert "telemetry" in CliRunner().invoke(app, ["simulate", "--help"]).output
