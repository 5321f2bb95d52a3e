"""Whatever bytes come: a message or Undecodable. Whatever message is made: the same one back."""

import math
from typing import Any

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from ingest.bus import HEADER_BYTES_MAX, Record, refuse_oversized
from ingest.clock import ManualClock
from ingest.codec import Codec, Undecodable
from ingest.dead_letters import dead_letter, original
from ingest.events import DeviceMetrics, Metrics, split_non_finite
from recovery.action import RECOVERY_TYPES
from tests.wire_examples import EXAMPLES, STAMP

CODEC = Codec(RECOVERY_TYPES)
ENCODED = {name: CODEC.encode(message) for name, message in EXAMPLES.items()}

anything_json = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
header = st.tuples(st.sampled_from(["ce_type", "ce_id", ""]) | st.text(max_size=8), st.binary(max_size=40))


def decoded_or_undecodable(headers: Any, value: bytes) -> None:
    try:
        message = CODEC.decode(headers, value)
    except Undecodable:
        return
    # What was accepted can be read to its end and said again.
    if isinstance(message, Metrics):
        for name in message.columns:
            assert len(message.column(name)) == len(message.steps)
    if 0.0 <= message.at < 1e11:
        CODEC.encode(message)


@given(st.lists(header, max_size=4), st.binary(max_size=200))
def test_any_bytes_are_a_message_or_undecodable(headers: list[tuple[str, bytes]], value: bytes) -> None:
    decoded_or_undecodable(headers, value)


@given(st.sampled_from(sorted(EXAMPLES)), anything_json, st.data())
def test_any_json_in_any_field_is_a_message_or_undecodable(name: str, wrong: Any, data: st.DataObject) -> None:
    encoded = ENCODED[name]
    fields = msgspec.json.decode(encoded.value)
    field = data.draw(st.sampled_from(sorted(fields)))
    decoded_or_undecodable(encoded.headers, msgspec.json.encode({**fields, field: wrong}))


@given(st.sampled_from(sorted(EXAMPLES)), st.data())
def test_any_damaged_byte_is_a_message_or_undecodable(name: str, data: st.DataObject) -> None:
    encoded = ENCODED[name]
    value = bytearray(encoded.value)
    start = data.draw(st.integers(0, len(value)))
    value[start : start + data.draw(st.integers(0, 8))] = data.draw(st.binary(max_size=8))
    decoded_or_undecodable(encoded.headers, bytes(value))


@given(st.sampled_from(sorted(EXAMPLES)), st.sampled_from([b"[", b'{"job":']), st.integers(1, 50_000))
def test_deep_nesting_is_undecodable_and_no_crash(name: str, opening: bytes, depth: int) -> None:
    decoded_or_undecodable(ENCODED[name].headers, opening * depth)


def strategy(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field, by msgspec's own description of its type."""
    match kind:
        case msgspec.inspect.IntType():
            return st.integers(-(2**53) if kind.ge is None else kind.ge, 2**53 if kind.le is None else kind.le)
        case msgspec.inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False, allow_infinity=False)
        case msgspec.inspect.StrType():
            return st.text(max_size=12)
        case msgspec.inspect.BoolType():
            return st.booleans()
        case msgspec.inspect.NoneType():
            return st.none()
        case msgspec.inspect.LiteralType():
            return st.sampled_from(kind.values)
        case msgspec.inspect.UnionType():
            return st.one_of([strategy(part) for part in kind.types])
        case msgspec.inspect.VarTupleType():
            return st.lists(strategy(kind.item_type), max_size=3).map(tuple)
        case msgspec.inspect.DictType():
            return st.dictionaries(strategy(kind.key_type), strategy(kind.value_type), max_size=3)
        case msgspec.inspect.StructType():
            return st.builds(kind.cls, **{field.name: strategy(field.type) for field in kind.fields})
    raise NotImplementedError(f"a message has a field of a new kind: {kind}")


@st.composite
def metrics(draw: st.DrawFn) -> Metrics:
    rows = draw(st.integers(0, 4))
    sample = st.none() | st.floats()
    named = draw(st.dictionaries(st.text(max_size=6), st.lists(sample, min_size=rows, max_size=rows), max_size=3))
    columns, non_finite = split_non_finite(named)
    message = Metrics(
        **STAMP, phase="train", step=draw(st.integers(-1, 2**53)), steps=tuple(range(rows)),
        ended_at=tuple(draw(st.lists(st.floats(0.0, 2e9), min_size=rows, max_size=rows))),
        columns=columns, non_finite=non_finite,
    )  # fmt: skip
    for name, values in named.items():
        assert repr(message.column(name)) == repr([v if v is None or not math.isnan(v) else math.nan for v in values])
    return message


@st.composite
def device_metrics(draw: st.DrawFn) -> DeviceMetrics:
    rows = draw(st.integers(0, 4))
    samples = st.lists(st.none() | st.floats(allow_nan=False, allow_infinity=False), min_size=rows, max_size=rows)
    return DeviceMetrics(
        **STAMP, device=draw(st.text(max_size=8)),
        sampled_at=tuple(draw(st.lists(st.floats(0.0, 2e9), min_size=rows, max_size=rows))),
        columns=draw(st.dictionaries(st.text(max_size=6), samples.map(tuple), max_size=3)),
    )  # fmt: skip


WITH_TABLES = {Metrics: metrics(), DeviceMetrics: device_metrics()}
STRATEGIES = {
    type_: WITH_TABLES[type_] if type_ in WITH_TABLES else strategy(msgspec.inspect.type_info(type_))
    for _, type_ in RECOVERY_TYPES.values()
}


@given(st.data())
def test_every_message_comes_back_equal(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(RECOVERY_TYPES)))
    type_ = RECOVERY_TYPES[name][1]
    message = data.draw(STRATEGIES[type_])
    at = data.draw(st.floats(0.0, 2e11))
    message = msgspec.structs.replace(message, at=at)
    encoded = CODEC.encode(message)
    assert CODEC.decode(encoded.headers, encoded.value) == message
    assert encoded.key == message.job


@given(st.lists(header, max_size=6).map(tuple), st.binary(max_size=64), st.text(max_size=900))
def test_a_dead_letter_holds_the_original_and_can_be_sent(
    headers: tuple[tuple[str, bytes], ...], value: bytes, reason: str
) -> None:
    record = Record("logs", 3, 41, "job", headers, value, 7.0)
    letter = dead_letter(record, reason, ManualClock(9.0))
    refuse_oversized(letter.topic, letter.headers, letter.value)
    assert sum(len(name.encode()) + len(raw) for name, raw in letter.headers) <= HEADER_BYTES_MAX
    kept = tuple(header for header in headers if not header[0].startswith("dlq_"))
    assert original(Record("dead-letters", 0, 0, letter.key, letter.headers, letter.value, 9.0)) == (kept, value)
