"""The small corpus of real faults in `data/`: each is found and blamed on whom it was done to, and that is all."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelines.evaluate.fault_runs import evaluate_run
from pipelines.fault_corpus.corpus import corpus_runs
from pipelines.settings import load_settings

CORPUS = Path("data/faults-small")
RUNS = list(corpus_runs(CORPUS))


@pytest.mark.parametrize(("folder", "corpus"), RUNS, ids=[folder.name for folder, _ in RUNS])
def test_a_real_fault_is_found_and_its_culprit_named(folder: Path, corpus) -> None:
    run = evaluate_run(folder, corpus, load_settings(None))
    for outcome in run.matched.outcomes:
        assert outcome.found or not outcome.label.right.must_be_found
        assert outcome.culprit_right in (True, None)
    assert [story.summary for story in run.matched.false] == []


def test_the_corpus_has_many_kinds_and_a_clean_run() -> None:
    kinds = {corpus.kind for _, corpus in RUNS}
    assert len(kinds) >= 10
    assert "clean" in kinds
