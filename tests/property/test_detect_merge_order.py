"""Properties of detection: arrival order and redelivery change nothing, and no line breaks the rules."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook, strip_prefixes
from detectors.merge import Merge
from tests.synthetic_job import SyntheticJob, with_places

PLAIN = DetectorConfig(ensemble=EnsembleConfig(on=False))
RULES = RuleBook.shipped()
KILLED = with_places(SyntheticJob(seed=3).start().train(40).kill(2).ordered())


def run(arrivals):
    """Verdicts when everything has arrived before the watermark moves."""
    merge, detector = Merge(), JobDetector("job", PLAIN, RULES)
    for message, place in arrivals:
        merge.put(message, place)
    merge.advance(max(message.at for message, _ in arrivals) + 30.0)
    order = []
    for merged in merge.take():
        order.append(merged.message)
        detector.observe(merged.message, merged.place)
    return order, detector.advance(merge.watermark)


ORDER, VERDICTS = run(KILLED)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), repeats=st.integers(0, 50))
def test_any_arrival_order_with_any_redelivery_gives_the_same_order_and_the_same_verdicts(
    seed: int, repeats: int
) -> None:
    dice = random.Random(seed)
    arrivals = KILLED + dice.choices(KILLED, k=repeats)
    dice.shuffle(arrivals)
    order, verdicts = run(arrivals)
    assert order == ORDER
    assert verdicts == VERDICTS
    assert verdicts


@settings(max_examples=10, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), window=st.integers(2, 12))
def test_arrival_within_the_watermark_does_not_matter_when_verdicts_are_drawn_on_the_way(
    seed: int, window: int
) -> None:
    """Messages are delayed by a few places, less than the heartbeats wait for, and taken after each arrival."""
    dice = random.Random(seed)
    arrivals = [
        pair
        for _, pair in sorted(enumerate(KILLED), key=lambda item: KILLED[item[0]][0].at + dice.random() * 0.02 * window)
    ]
    merge, detector = Merge(), JobDetector("job", PLAIN, RULES)
    verdicts = []
    for message, place in arrivals:
        merge.put(message, place)
        for merged in merge.take():
            assert not merged.late
            detector.observe(merged.message, merged.place)
        verdicts += detector.advance(merge.watermark)
    assert verdicts == VERDICTS[: len(verdicts)]
    assert verdicts


@given(st.text(max_size=300))
def test_no_line_whatsoever_breaks_the_rules(line: str) -> None:
    RULES.match_record(line)
    assert len(strip_prefixes(line)) <= len(line)
