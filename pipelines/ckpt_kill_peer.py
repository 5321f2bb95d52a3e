"""What a kill campaign's second node keeps of the rank's saves, fetched like another engine would and compared."""

from __future__ import annotations

import os
from pathlib import Path

from ckpt_engine.clock import HostClock
from ckpt_engine.errors import CheckpointDamaged
from ckpt_engine.memfd import Segment, create_segment
from ckpt_engine.ring_link import Caller, Holding, PeerLink, dial
from ckpt_engine.ring_members import FOLDER, decode_member
from ckpt_engine.segment import SlotHeader, payload_region
from ckpt_engine.wire import WireError
from pipelines.ckpt_kill_engine import HOLDER, TOKEN
from pipelines.ckpt_kill_rank import JOB, payload_of

LOOKER = "look"  # the name of a node that there is not
SECONDS_MAX = 10.0


def copies_at_peer(directory: Path, seed: int, payload_bytes: int) -> list[bool]:
    """Whether each shard that the second node hands out now is a save, bit for bit. One that is overtaken while it is
    sent is left out, and so is a node that does not answer."""
    try:
        member = decode_member((directory / FOLDER / f"{HOLDER}.json").read_bytes())
    except FileNotFoundError:
        return []
    if member is None:
        return []
    caller = Caller(TOKEN, JOB, LOOKER, HostClock(), os.urandom, SECONDS_MAX, SECONDS_MAX)
    try:
        link = dial(member, caller)
    except WireError:
        return []
    try:
        found = [_is_whole(link, holding, seed, payload_bytes) for holding in link.holdings()]
        return [whole for whole in found if whole is not None]
    except WireError:
        return []
    finally:
        link.close()


def _is_whole(link: PeerLink, holding: Holding, seed: int, payload_bytes: int) -> bool | None:
    segments: list[Segment] = []

    def allocate(header: SlotHeader, size_bytes: int) -> Segment:
        segments.append(create_segment(size_bytes))
        return segments[0]

    try:
        fetched = link.fetch(holding, allocate)
        found = bytes(payload_region(segments[0].view, fetched.header))
        return found == payload_of(seed, holding.attempt, holding.step, payload_bytes)
    except CheckpointDamaged:
        return False
    except WireError:
        return None
    finally:
        for segment in segments:
            segment.discard()
