"""What the ensemble is made of and when it is fitted; all of it is configuration."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from detectors.steps import TIMINGS

if TYPE_CHECKING:
    from detectors.ensemble.start import Start


@dataclass(frozen=True, slots=True)
class EnsembleConfig:
    """Steps are counted, never timed, so that a replay fits at the same ones. Decades: -log10 of a probability."""

    on: bool = True
    members: tuple[str, ...] = ("top1", "top2", "top3", "PCA", "KNN")  # decide; topK: mean of the K largest |z|
    votes: tuple[str, ...] = ("HBOS", "IForest")  # add to what was decided
    vote_weight: float = 0.25
    weights: tuple[tuple[str, float], ...] = ()  # of a member's or a vote's decades; 1 where none is given
    features: tuple[str, ...] = TIMINGS
    budget_per_day: float = 0.5  # alarms of the ensemble alone on a clean job, over all its ranks
    persistence: tuple[int, int] = (6, 8)  # steps above the threshold, of so many
    fit_steps: int = 200  # clean steps behind the first fit
    refit_steps: int = 500
    windows_max: int = 4096  # clean windows kept to learn from
    windows_each_step: int = 8
    rows_max: int = 4096
    reference_rows_max: int = 512  # of KNN
    suspects_max: int = 64  # ranks of a step that the slow members score
    suspect_decades: float = 2.0
    vote_decades: float = 4.0
    hold_steps: int = 20  # a clean window is learned from only when it has stayed clean for so long
    restart_steps: int = 20  # after a (re)start nothing is learned and nothing decided
    close_steps: int = 10
    ranks_at_once: float = 0.03  # of the ranks; more than these (and four) odd at once are a part of the job
    few_shadow_steps: int = 500  # in a small job it decides only after so many clean steps without an alarm of its own
    excess_min: float = 0.08  # of the peers' compute time; of the step for data
    few_excess_min: float = 0.06  # in a small job: over the largest of the others, each against its own normal
    unsure_factor: float = 1.25  # on the threshold while there are fewer windows than `sure_windows`
    sure_windows: int = 2048
    smooth: float = 0.15  # weight of the newest step in the running mean that is scored: about twelve steps
    wrong_way_z: float = 0.6  # in a slower computation or a later batch: being fast is no fault
    differ_max: float = 3.0  # a refit whose 99th percentile of the last clean steps is so much different is rejected
    rejections_max: int = 2  # in a row; then what is normal has changed
    start: Start | None = None  # fitted before, by `transom fit`
