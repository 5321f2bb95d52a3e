"""One simulated run through detection: messages as they arrive, verdicts, and the right answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from detectors.clues import TOPIC_OF, Place
from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook
from detectors.merge import Merge
from detectors.verdict import FaultClass, Verdict
from ingest.events import FaultInjected, Metrics
from pipelines.evaluate.matching import CulpritKind, Label, Matched, Right, Story, match, stories_of
from pipelines.evaluate.step_arrays import StepArrays, StepCollector
from pipelines.simulation.labels import SimulatedLabel
from pipelines.simulation.scenario import Scenario
from pipelines.simulation.simulation import Simulation

CONCLUDE_SECONDS = 0.5  # a simulated step takes one
AFTERWARDS_SECONDS = 30.0  # what only time decides is decided within it
TOLERANCE_SECONDS = 10.0
TELL_MESSAGES = 5_000
SLOWS_ALL: frozenset[FaultClass] = frozenset(
    ("straggler", "throttled", "data_stall", "contended_node", "link_degraded", "job_slow")
)
PACE: frozenset[FaultClass] = frozenset(("job_slow", "regime_change"))  # true of a job that waits for one rank


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was said of one run, beside the truth."""

    name: str
    ranks: int
    labels: tuple[Label, ...]
    stories: tuple[Story, ...]
    matched: Matched
    clean_steps: int
    arrays: StepArrays | None


def right_label(label: SimulatedLabel) -> Label:
    """A label of the simulator as matching reads it."""
    blamed: CulpritKind = "rank" if label.ranks else "node" if label.node is not None else "nobody"
    right = Right(
        classes=frozenset((label.fault_class, *label.also_right)),
        culprit=blamed if label.is_fault else "any",
        must_be_found=label.is_fault,
        tolerated=PACE if label.fault_class in SLOWS_ALL else frozenset(),
    )
    return Label(label.kind, right, label.onset_at, label.end_at, label.ranks, label.node, label.severity)


def run_simulation(
    name: str,
    scenario: Scenario,
    config: DetectorConfig,
    rules: RuleBook,
    *,
    arrays: bool = False,
    detect: bool = True,
    tell: Callable[[float], None] = lambda seconds: None,
) -> SimulatedRun:
    """Run a scenario through the merge and the job's detector, as the service does, under the simulated clock.

    `arrays`: keep the step times, for baselines. `detect` False: nothing else. `tell` hears the job's seconds.
    """
    simulation = Simulation(scenario)
    merge, detector = Merge(config.merge), JobDetector(scenario.job, config, rules)
    collector = StepCollector()
    ends: dict[int, float] = {}
    offsets: Counter[str] = Counter()
    verdicts: list[Verdict] = []
    said_at: list[float] = []
    now, concluded_at = scenario.start_at, scenario.start_at

    def conclude(at: float) -> None:
        merge.advance(at)
        for merged in merge.take():
            detector.observe(merged.message, merged.place)
        fresh = detector.advance(merge.watermark) if merge.watermark is not None else []
        verdicts.extend(fresh)
        said_at.extend([at] * len(fresh))

    for count, (message, arrives_at) in enumerate(simulation.messages()):
        now = max(now, arrives_at)
        if isinstance(message, Metrics):
            for step, at in zip(message.steps, message.ended_at, strict=True):
                ends[step] = max(at, ends.get(step, 0.0))
            if arrays:
                collector.take(message)
        if detect and not isinstance(message, FaultInjected):
            topic = TOPIC_OF[type(message)]
            merge.put(message, Place(topic, 0, offsets[topic], now), now)
            offsets[topic] += 1
            if now - concluded_at >= CONCLUDE_SECONDS:
                conclude(now)
                concluded_at = now
        if count % TELL_MESSAGES == 0:
            tell(now - scenario.start_at)
    for tick in range(int(AFTERWARDS_SECONDS / CONCLUDE_SECONDS) if detect else 0):
        conclude(now + tick * CONCLUDE_SECONDS)
    labels = tuple(right_label(label) for label in simulation.labels)
    stories = tuple(stories_of(verdicts, said_at))
    faults = [label for label in labels if label.right.must_be_found]
    clean = sum(not any(label.covers(at, TOLERANCE_SECONDS) for label in faults) for at in ends.values())
    return SimulatedRun(
        name=name, ranks=scenario.ranks, labels=labels, stories=stories,
        matched=match(labels, stories, TOLERANCE_SECONDS), clean_steps=clean,
        arrays=collector.arrays() if arrays else None,
    )  # fmt: skip
