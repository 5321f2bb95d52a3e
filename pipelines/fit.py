"""`transom fit`: the ensemble's normal from recorded runs, as a model that detection can start from.

Every run is read through the live pipeline's merge and channels, and its clean windows are collected; what was labelled
as a fault, and what a rule finds by itself, is left out. Nothing of a run's own level is kept: windows hold deviations
from peers, so that one job's normal fits another's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
import numpy as np

from detectors.config import DetectorConfig
from detectors.ensemble.committee import Committee, fitted
from detectors.ensemble.ensemble import Ensemble, Singles, versions
from detectors.ensemble.feedback import Judged, eased, least
from detectors.ensemble.models import SEED
from detectors.ensemble.start import start_from
from detectors.ensemble.stored import Peers, StoredModel, StoredPart
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook
from detectors.merge import Merge
from ingest.bus import Record
from ingest.codec import Codec, Undecodable
from ingest.events import JOB_TOPICS, MESSAGE_TYPES
from pipelines.errors import StatedError
from pipelines.evaluate.matching import TOLERANCE_SECONDS
from pipelines.fit_labels import Span, judged_of, missed_spans, spans_of
from pipelines.recording import RUN_FILE, in_bus_order, read_recording
from pipelines.replay import AFTERWARDS_SECONDS, CONCLUDE_SECONDS

NEVER = 2**62
RANKS_SHOWN = (8, 64, 512, 4096)


class CannotFit(StatedError):
    """The runs do not carry a model; the text says what is missing."""


@dataclass(frozen=True, slots=True)
class RunFitted:
    """What one run gave."""

    name: str
    peers: Peers | None
    clean_steps: int
    windows: int
    labelled: int  # spans left out


@dataclass(frozen=True, slots=True)
class Fit:
    """The model and what a person wants to know of it. `thresholds`: decades by kind of peers and number of ranks."""

    model: StoredModel
    runs: tuple[RunFitted, ...]
    thresholds: dict[Peers, dict[int, float]]
    step_seconds: float
    notes: tuple[str, ...] = ()
    judged: tuple[Judged, ...] = field(default=())


def recordings_in(paths: Sequence[Path]) -> list[Path]:
    """The run folders among these paths and directly or two levels below them. Raises CannotFit."""
    found: list[Path] = []
    for path in paths:
        if (path / RUN_FILE).is_file():
            found.append(path)
            continue
        below = sorted(file.parent for pattern in (f"*/{RUN_FILE}", f"*/*/{RUN_FILE}") for file in path.glob(pattern))
        if not below:
            raise CannotFit(f"{path} holds no recorded run; give folders that `transom record` or `simulate` wrote")
        found += below
    return found


def fit(
    paths: Sequence[Path], config: DetectorConfig, *, feedback: bool, told: Callable[[str, int], None] = lambda *_: None
) -> Fit:
    """Fit on recorded runs. `told` hears of each run and how many of its messages are read.

    Raises CannotFit where there are too few clean steps, NotARecording for a folder that is none.
    """
    if not config.ensemble.on:
        raise CannotFit("the ensemble is switched off (detect.ensemble.enabled); switch it on to fit it")
    plain = replace(config.ensemble, start=None)
    collected: dict[Peers, list[Singles]] = {"few": [], "many": []}
    steps: dict[Peers, int] = {"few": 0, "many": 0}
    runs, lengths, judged = [], [], []
    for folder in paths:
        spans = spans_of(folder)
        records = _counted(read_recording(folder), folder.name, told)
        ensemble = _read(records, replace(config, ensemble=replace(plain, fit_steps=NEVER)), spans)
        if feedback:
            judged += judged_of(folder)
        peers = ensemble.peers
        runs.append(RunFitted(folder.name, peers, ensemble.clean_steps, len(ensemble.windows), len(spans)))
        if peers is not None and len(ensemble.windows):
            collected[peers].append(ensemble.windows)
            steps[peers] += ensemble.clean_steps
            lengths.append(ensemble.step_seconds)
    parts: dict[Peers, StoredPart] = {}
    windows: dict[Peers, Singles] = {}
    committees: dict[Peers, Committee] = {}
    names = tuple(run.name for run in runs if run.windows)
    notes = []
    for peers, given in collected.items():
        committee = fitted(_shared_out(given, plain.windows_max), plain) if given else None
        if committee is None:
            if given:
                notes.append(f"the runs with {peers} peers have too few clean steps to be learned from")
            continue
        committees[peers], windows[peers] = committee, committee.windows
        parts[peers] = StoredPart(
            windows=len(committee.windows), checks=committee.checks, runs=names, steps=steps[peers],
            level_decades=committee.levels.score_at(3.0),
        )  # fmt: skip
    if not parts:
        raise CannotFit(
            "there are too few clean steps in these runs to fit the ensemble on; give longer or more clean runs "
            "(some hundred steps of plain training, after the first eighty)"
        )
    step_seconds = float(np.median(lengths))
    model = StoredModel(
        features=plain.features, persistence=plain.persistence, members=plain.members, votes=plain.votes, seed=SEED,
        versions=versions(plain), parts=parts, windows=dict(windows),
    )  # fmt: skip
    if feedback:
        model, told_notes = _rethresholded(model, judged, paths, config)
        notes += told_notes
    thresholds = {
        peers: {ranks: one.threshold(ranks, step_seconds) for ranks in (RANKS_SHOWN if peers == "many" else (4,))}
        for peers, one in committees.items()
    }
    return Fit(model, tuple(runs), thresholds, step_seconds, tuple(notes), tuple(judged))


def _rethresholded(
    model: StoredModel, judged: Sequence[Judged], paths: Sequence[Path], config: DetectorConfig
) -> tuple[StoredModel, list[str]]:
    """Classes whose verdicts people called wrong need more decades, those whose faults were missed fewer."""
    raised, notes = least(judged)
    missed = [(folder, spans) for folder in paths if (spans := missed_spans(folder))]
    reached: list[tuple[str, float, float]] = []
    for folder, spans in missed:
        reached += _levels_in(folder, spans, config, model)
    lowered, more = eased(reached)
    return msgspec.structs.replace(model, least=raised, eased=lowered), [*notes, *more]


def _levels_in(
    folder: Path, spans: Sequence[Span], config: DetectorConfig, model: StoredModel
) -> list[tuple[str, float, float]]:
    """For each labelled fault that nobody found: its class, the highest level of its rank, and what was asked."""
    plain = replace(config.ensemble, start=None)
    started = replace(config, ensemble=replace(plain, start=start_from(model, plain), fit_steps=NEVER))
    highest: dict[Span, tuple[float, float]] = {}

    def look(detector: JobDetector, now: float) -> None:
        for span in spans:
            if span.onset_at <= now <= span.ended_at + TOLERANCE_SECONDS and span.rank is not None:
                found = detector.ensemble_level(span.rank, span.fault_class)
                if found is not None:
                    highest[span] = max(found, highest.get(span, (0.0, 0.0)))

    _read(read_recording(folder), started, spans, look)
    return [(span.fault_class, level, asked) for span, (level, asked) in highest.items()]


def _read(
    records: Iterable[Record], config: DetectorConfig, spans: Sequence[Span],
    look: Callable[[JobDetector, float], None] | None = None,
) -> Ensemble:  # fmt: skip
    """Read one recording; the ensemble that collected its clean windows (that of the run's first job)."""

    def trusted(now: float) -> bool:
        return not any(span.onset_at - 1.0 <= now <= span.ended_at + TOLERANCE_SECONDS for span in spans)

    codec = Codec(MESSAGE_TYPES)
    merge, detector = Merge(config.merge), None
    concluded_at = now = 0.0
    for record in in_bus_order(records):
        if record.topic not in JOB_TOPICS:
            continue
        try:
            message = codec.decode(record.headers, record.value)
        except Undecodable:
            continue
        if detector is None:
            detector = JobDetector(message.job, config, RuleBook.shipped(), trusted=trusted)
        now = max(now, record.appended_at)
        merge.put(message, None, record.appended_at)
        if now - concluded_at >= CONCLUDE_SECONDS:
            _advance(merge, detector, now)
            concluded_at = now
            if look is not None:
                look(detector, now)
    if detector is None:
        return Ensemble(config.ensemble)
    _advance(merge, detector, now + AFTERWARDS_SECONDS)
    return detector.ensemble


def _advance(merge: Merge, detector: JobDetector, now: float) -> None:
    merge.advance(now, ())
    for merged in merge.take(()):
        detector.observe(merged.message, None)
    if merge.watermark is not None:
        detector.advance(merge.watermark)


def _counted(records: Iterable[Record], name: str, told: Callable[[str, int], None]) -> Iterable[Record]:
    for number, record in enumerate(records):
        if number % 500 == 0:
            told(name, number)
        yield record


def _shared_out(parts: Sequence[Singles], windows_max: int) -> Singles:
    """At most so many windows, the same share of each run."""
    each = max(1, windows_max // len(parts))
    picked = [np.unique(np.linspace(0, len(part) - 1, min(each, len(part))).astype(np.int64)) for part in parts]
    return np.concatenate([part[at] for part, at in zip(parts, picked, strict=True)])
