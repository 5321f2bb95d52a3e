"""Prometheus' text format and query answers as samples of ours: the only door to prometheus-client's parser."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from ingest.sources.metric_names import MAPPED, device_of

SAMPLES_MAX = 200_000  # of one scrape: a node exporter has two thousand


class NotExposition(ValueError):
    """The text is not Prometheus' text format; one sentence."""


class DeviceSample(NamedTuple):
    """One number in our name and unit. `labels` say whose it is."""

    name: str
    value: float
    device: str
    labels: Mapping[str, str]


class _Result(msgspec.Struct):
    metric: dict[str, str] = {}
    value: tuple[float, str] | None = None


class _Answer(msgspec.Struct):
    status: str = ""
    error: str = ""
    data: dict[str, msgspec.Raw] = {}


def parse_exposition(text: str) -> list[DeviceSample]:
    """The samples that have a name of ours; others are passed over. Raises NotExposition.

    Raises ImportError without the extra `collect`.
    """
    from prometheus_client.parser import text_string_to_metric_families

    found: list[DeviceSample] = []
    try:
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found += mapped(sample.name, sample.labels, float(sample.value))
                if len(found) > SAMPLES_MAX:
                    raise NotExposition(f"there are more than {SAMPLES_MAX} samples; narrow what is scraped")
    except (ValueError, KeyError, IndexError, RecursionError) as error:
        raise NotExposition(
            f"this is not Prometheus' text format ({error}); is the address one of /metrics?"
        ) from error
    return found


def parse_query(body: bytes) -> list[DeviceSample]:
    """The same of the answer of `/api/v1/query` (an instant vector). Raises NotExposition."""
    try:
        answer = msgspec.json.decode(body, type=_Answer)
        if answer.status != "success":
            raise NotExposition(f"Prometheus refuses the query: {answer.error or 'no reason is given'}")
        results = msgspec.json.decode(answer.data.get("result", b"[]"), type=list[_Result])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise NotExposition(f"this is no answer of Prometheus' query API ({error}); check the address") from error
    found: list[DeviceSample] = []
    for result in results[:SAMPLES_MAX]:
        if result.value is not None:
            try:
                number = float(result.value[1])
            except ValueError:
                continue
            found += mapped(result.metric.get("__name__", ""), result.metric, number)
    return found


def mapped(name: str, labels: Mapping[str, str], value: float) -> Iterable[DeviceSample]:
    """One sample in our words, where we have any; NaN, which exporters give for "not known", is none."""
    known = MAPPED.get(name)
    if known is None or not math.isfinite(value) or not known.takes(labels):
        return ()
    return (DeviceSample(known.name, value * known.factor, device_of(known, labels), dict(labels)),)
