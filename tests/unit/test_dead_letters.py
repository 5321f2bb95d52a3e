"""A dead letter holds the original whole, within what a bus takes."""

from ingest.bus import Record, refuse_oversized
from ingest.clock import ManualClock
from ingest.codec import MESSAGE_BYTES_MAX
from ingest.dead_letters import KEPT_BYTES_OF_OVERSIZED, dead_letter, original

CLOCK = ManualClock(1_790_000_000.5)
HEADERS = (("ce_type", b"org.transom.metrics.v9"), ("x", b"\xff"))


def test_the_original_is_unchanged_and_the_reason_stands_beside_it() -> None:
    letter = dead_letter(Record("metrics", 2, 41, "demo", HEADERS, b"\x00", 1.0), "not known here", CLOCK)
    assert (letter.topic, letter.key, letter.value) == ("dead-letters", "demo", b"\x00")
    assert letter.headers[:2] == HEADERS
    assert dict(letter.headers[2:]) == {
        "dlq_topic": b"metrics", "dlq_partition": b"2", "dlq_offset": b"41", "dlq_reason": b"not known here",
        "dlq_at": b"1790000000.500000",
    }  # fmt: skip
    buried = Record("dead-letters", 0, 7, letter.key, letter.headers, letter.value, 2.0)
    assert original(buried) == (HEADERS, b"\x00")


def test_of_an_oversized_value_the_beginning_is_kept_and_its_length_told() -> None:
    value = b"a" * (MESSAGE_BYTES_MAX + 1)
    letter = dead_letter(Record("logs", 0, 0, "demo", (), value, 1.0), "too long", CLOCK)
    assert letter.value == value[:KEPT_BYTES_OF_OVERSIZED]
    assert dict(letter.headers)["dlq_value_bytes"] == str(MESSAGE_BYTES_MAX + 1).encode()


def test_headers_that_no_bus_takes_are_dropped_and_counted() -> None:
    many = tuple((f"h{number}", b"x" * 10_000) for number in range(5))
    letter = dead_letter(Record("logs", 0, 0, "demo", many, b"", 1.0), "r" * 9_999, CLOCK)
    refuse_oversized(letter.topic, letter.headers, letter.value)
    assert letter.headers[:2] == many[:2]
    assert dict(letter.headers)["dlq_headers_dropped"] == b"3"
