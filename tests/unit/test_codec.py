"""The codec's edges: what is refused, and with which sentence."""

import math

import msgspec
import pytest

from ingest.codec import MESSAGE_BYTES_MAX, Codec, Undecodable, message_type
from ingest.events import (
    MESSAGE_TYPES,
    TOPICS,
    LogLine,
    Logs,
    Metrics,
    NodeHeartbeat,
    NonFinite,
    newest_at,
    split_non_finite,
)
from recovery.action import RECOVERY_TYPES
from tests.wire_examples import EXAMPLES, STAMP

CODEC = Codec(RECOVERY_TYPES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_comes_back_equal_on_its_topic_and_key(name: str) -> None:
    message = EXAMPLES[name]
    encoded = CODEC.encode(message)
    assert CODEC.decode(encoded.headers, encoded.value) == message
    assert encoded.topic == RECOVERY_TYPES[name][0]
    assert encoded.key == message.job
    assert message_type(encoded.headers) == name


def test_a_type_is_found_wherever_among_the_headers_it_stands() -> None:
    beat = EXAMPLES["node_heartbeat.v1"]
    encoded = CODEC.encode(beat)
    (typed,) = [pair for pair in encoded.headers if pair[0] == "ce_type"]
    others = [pair for pair in encoded.headers if pair != typed]
    for place in range(len(encoded.headers)):
        headers = [*others[:place], typed, *others[place:]]
        assert CODEC.decode(headers, encoded.value) == beat
        assert message_type(headers) == "node_heartbeat.v1"
    assert CODEC.decode([typed], encoded.value) == beat


def test_a_redelivered_message_carries_the_same_id_and_another_one_does_not() -> None:
    beat = EXAMPLES["node_heartbeat.v1"]
    identity = dict(CODEC.encode(beat).headers)["ce_id"]
    assert dict(CODEC.encode(msgspec.structs.replace(beat)).headers)["ce_id"] == identity
    later = msgspec.structs.replace(beat, sequence=beat.sequence + 1)
    assert dict(CODEC.encode(later).headers)["ce_id"] != identity


def test_every_type_lies_on_a_topic_that_exists() -> None:
    assert {topic for topic, _ in RECOVERY_TYPES.values()} <= set(TOPICS)


@pytest.mark.parametrize(
    ("headers", "reason"),
    [
        ([], "no ce_type header"),
        ([("ce_type", b"\xff")], "not UTF-8"),
        ([("ce_type", None)], "not UTF-8"),
        ([("ce_type", b"org.transom.metrics.v2")], "'metrics.v2' is not known here"),
        ([("ce_type", b"com.example.thing")], "is not known here"),
    ],
)
def test_unknown_and_missing_types_are_undecodable(headers: list[tuple[str, bytes]], reason: str) -> None:
    with pytest.raises(Undecodable, match=reason):
        CODEC.decode(headers, b"{}")


def test_a_codec_knows_only_the_types_it_was_given() -> None:
    encoded = CODEC.encode(EXAMPLES["verdict.v1"])
    with pytest.raises(Undecodable, match=r"verdict\.v1"):
        Codec(MESSAGE_TYPES).decode(encoded.headers, encoded.value)


def test_oversized_messages_are_refused_at_both_ends() -> None:
    line = LogLine(at=1.0, stream="stdout", text="x" * MESSAGE_BYTES_MAX)
    with pytest.raises(ValueError, match="exceeds the limit"):
        CODEC.encode(Logs(**STAMP, lines=(line,)))
    headers = CODEC.encode(EXAMPLES["logs.v1"]).headers
    with pytest.raises(Undecodable, match="the limit is"):
        CODEC.decode(headers, b" " * (MESSAGE_BYTES_MAX + 1))


def test_text_that_is_no_unicode_and_times_that_are_no_dates_are_value_errors() -> None:
    with pytest.raises(ValueError, match="surrogates"):
        CODEC.encode(NodeHeartbeat(**{**STAMP, "node": "\ud800"}))
    for at in (math.nan, math.inf, -1.0, 1e18):
        with pytest.raises(ValueError, match="no time of a message"):
            CODEC.encode(NodeHeartbeat(**{**STAMP, "at": at}))


@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("rank", "-2"), ("rank", "1000000"), ("attempt", "-1"), ("step", "1e3"), ("step", "10000000000000000000000"),
        ("sequence", "null"), ("at", "-1"), ("at", "1e300"), ("at", '"now"'), ("phase", '"lunch"'), ("job", "7"),
        ("steps", "[1]"), ("ended_at", "[]"), ("columns", '{"train.loss":[1.0]}'),
        ("non_finite", '[["train.loss",3,"nan"]]'), ("non_finite", '[["train.loss",-1,"nan"]]'),
        ("non_finite", '[["nothing",0,"nan"]]'), ("non_finite", '[["train.loss",0,"null"]]'),
    ],
)  # fmt: skip
def test_a_field_out_of_its_range_is_undecodable(field: str, wrong: str) -> None:
    encoded = CODEC.encode(EXAMPLES["metrics.v1"])
    fields = msgspec.json.decode(encoded.value, type=dict[str, msgspec.Raw])
    value = msgspec.json.encode({**fields, field: msgspec.Raw(wrong.encode())})
    with pytest.raises(Undecodable, match=r"not a metrics\.v1 message"):
        CODEC.decode(encoded.headers, value)


def test_nan_and_infinities_come_back_where_they_were() -> None:
    message = EXAMPLES["metrics.v1"]
    loss = CODEC.decode(CODEC.encode(message).headers, CODEC.encode(message).value).column("train.loss")
    assert math.isnan(loss[0])
    assert loss[1:] == [2.5, -math.inf]
    assert message.column("train.step.duration") == [0.125, None, math.inf]


def test_columns_that_do_not_fit_the_steps_are_refused_where_they_are_made() -> None:
    with pytest.raises(ValueError, match="one entry for each of the 1 steps"):
        Metrics(**STAMP, phase="train", step=1, steps=(0,), ended_at=(1.0,), columns={"train.loss": (1.0, 2.0)})
    with pytest.raises(ValueError, match=r"not there: train\.loss\[1\]"):
        Metrics(
            **STAMP, phase="train", step=1, steps=(0,), ended_at=(1.0,), columns={"train.loss": (None,)},
            non_finite=(NonFinite("train.loss", 1, "nan"),),
        )  # fmt: skip


def test_split_non_finite_keeps_what_json_can_carry() -> None:
    finite, rest = split_non_finite({"a": [1.0, None, math.nan], "b": [math.inf, -math.inf]})
    assert finite == {"a": (1.0, None, None), "b": (None, None)}
    assert rest == (NonFinite("a", 2, "nan"), NonFinite("b", 0, "inf"), NonFinite("b", 1, "-inf"))


def test_newest_at_is_the_latest_time_or_zero() -> None:
    assert newest_at([]) == 0.0
    assert newest_at([NodeHeartbeat(**{**STAMP, "at": at}) for at in (3.0, 9.0, 5.0)]) == 9.0
