"""An engine's counters in Prometheus' text format, alone and of several engines, as its own parser reads them."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ckpt_engine.counters import Counters, gauge, merged
from ckpt_engine.event import EngineEvent
from tests.ckpt_lab import RawRank, engine_in_thread, eventually

LABELS = {"job": 'a "job"\\\n', "node": "n0"}


def samples(text: str) -> dict[tuple[str, str, str], float]:
    """(name, state, node) to value."""
    return {
        (sample.name, sample.labels.get("state", ""), sample.labels["node"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_events_are_counted_with_their_bytes_and_seconds() -> None:
    counters = Counters()
    for step in (10, 20):
        counters.observe(EngineEvent("durable", step, 1, 0, "disk", 100.0 + step, 500, 0.25))
    counters.observe(EngineEvent("failed", 30, 1, 0, "disk", 140.0, reason="full"))
    found = samples(counters.text(LABELS, {"keeper_up": ("Whether", 1)}))
    assert found[("transom_ckpt_events_total", "durable", "n0")] == 2
    assert found[("transom_ckpt_event_bytes_total", "durable", "n0")] == 1000
    assert found[("transom_ckpt_event_seconds_total", "durable", "n0")] == 0.5
    assert found[("transom_ckpt_last_step", "durable", "n0")] == 20
    assert found[("transom_ckpt_last_timestamp_seconds", "failed", "n0")] == 140.0
    assert found[("transom_ckpt_keeper_up", "", "n0")] == 1


def test_names_of_jobs_cannot_break_the_format() -> None:
    (family,) = text_string_to_metric_families(gauge("engine_up", "Whether", LABELS, 1))
    assert family.samples[0].labels == LABELS


def test_several_engines_are_one_text_with_each_name_once() -> None:
    texts = []
    for node in ("n0", "n1"):
        counters = Counters()
        counters.observe(EngineEvent("sealed", 10, 1, 0, "memory", 1.0, 5))
        texts += [counters.text({"job": "j", "node": node}, {}), gauge("engine_up", "U", {"job": "j", "node": node}, 1)]
    text = merged(texts)
    heads = [line for line in text.splitlines() if line.startswith("# TYPE")]
    assert len(heads) == len(set(heads))
    found = samples(text)
    assert [found[("transom_ckpt_events_total", "sealed", node)] for node in ("n0", "n1")] == [1, 1]
    assert found[("transom_ckpt_engine_up", "", "n1")] == 1


@pytest.mark.parametrize("texts", [[], [""], ["\n\n"]])
def test_nothing_is_nothing(texts: list[str]) -> None:
    assert merged(texts) == ""


def test_an_engine_tells_its_counters_on_its_socket(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, memory_bytes_max=1 << 20) as lab:
        rank = RawRank(lab.socket)
        rank.save(3, b"weights")
        assert rank.durable(3) == ""
        eventually(lambda: lab.told("complete", 3))
        found = samples(lab.admin.metrics())
        assert found[("transom_ckpt_events_total", "sealed", "n0")] == 1
        assert found[("transom_ckpt_events_total", "registered", "n0")] == 1
        assert found[("transom_ckpt_last_step", "complete", "n0")] == 3
        assert found[("transom_ckpt_sealed_shards", "", "n0")] == 1
        assert found[("transom_ckpt_memory_bytes", "", "n0")] == lab.admin.status().memory_bytes
        assert found[("transom_ckpt_memory_max_bytes", "", "n0")] == 1 << 20
        assert found[("transom_ckpt_room_bytes", "", "n0")] > 0
        assert found[("transom_ckpt_keeper_up", "", "n0")] == 0
        assert found[("transom_ckpt_persist_failing", "", "n0")] == 0
        rank.close()
