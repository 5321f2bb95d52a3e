"""Whatever comes over the telemetry socket, a rank's training goes on."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ingest.clock import ManualClock
from ingest.injection import FAULTS, Injector
from ingest.rank_socket import pack, unpack

TYPES = st.text(st.characters(codec="ascii", exclude_characters="\n"), max_size=20)


@given(TYPES, st.binary(max_size=200))
def test_every_packet_comes_apart_as_it_was_made(packet_type: str, body: bytes) -> None:
    assert unpack(pack(packet_type, body)) == (packet_type, body)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_packet_or_a_value_error(packet: bytes) -> None:
    try:
        packet_type, body = unpack(packet)
    except ValueError:
        return
    assert pack(packet_type, body) == packet


@given(
    st.one_of(
        st.binary(max_size=200),
        st.builds(
            lambda fault, step, factor: f'{{"fault":"{fault}","at_step":{step},"factor":{factor}}}'.encode(),
            st.sampled_from([*FAULTS, "melt"]),
            st.integers(),
            st.floats(),
        ),
    )
)
def test_any_request_is_armed_within_its_bounds_or_refused(body: bytes) -> None:
    injector = Injector(ManualClock(0.0), allowed=True)
    injector.request(body)
    request = injector.due(1_000_000)
    assert request is None or (request.fault in FAULTS and 1.0 <= request.factor <= 100.0)
    assert 0 <= injector.extra_forwards() < 100
