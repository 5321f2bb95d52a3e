"""Engines of a ring, in threads: copies go round, a lost node's come back, and no save ever waits for a peer."""

from __future__ import annotations

import contextlib
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.errors import EngineRefused
from ckpt_engine.ring_config import RingConfig
from ckpt_engine.status import EngineStatus
from tests.ckpt_lab import Lab, RawRank, engine_in_thread, eventually
from tests.ring_lab import TOKEN, backed_up, kept, ring_config, ring_engine, ring_engines, ring_of

PAYLOAD = bytes(range(256)) * 1000  # four chunks


def saved(lab: Lab, step: int, rank: int = 0, payload: bytes = PAYLOAD, attempt: int = 1, world_size: int = 2) -> None:
    with RawRank(lab.socket, rank=rank, world_size=world_size, attempt=attempt) as rawrank:
        rawrank.save(step, payload)


def loaded(lab: Lab, step: int, rank: int = 0, attempt: int = 2, world_size: int = 2) -> dict[str, Any]:
    with RawRank(lab.socket, rank=rank, world_size=world_size, attempt=attempt) as rawrank:
        return rawrank.load(step)


def test_what_is_sealed_here_is_soon_kept_on_the_next_node(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1", "n2") as (first, second, third):
        saved(first, 7)
        assert backed_up(first, 0, 1, 7) == ""
        assert kept(second) == [("n0", 0, 7)]
        assert kept(third) == []
        (event,) = eventually(lambda: first.told("backed_up", 7))
        assert (event.tier, event.rank, event.size_bytes, event.reason) == ("peer", 0, len(PAYLOAD), "on n1")
        assert event.seconds > 0


def test_a_ticket_can_wait_for_it_over_the_socket(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1") as (first, _), RawRank(first.socket) as rank:
        rank.save(7, PAYLOAD)
        request = {"op": "wait", "rank": 0, "attempt": 1, "step": 7, "what": "peer", "timeout_seconds": 10.0}
        assert rank.link.ask_aside(request, 10.0) == {"settled": True, "reason": ""}
        rank.save(8, PAYLOAD)
        rank.save(9, PAYLOAD)
        assert rank.link.ask_aside({**request, "step": 9}, 10.0) == {"settled": True, "reason": ""}


def test_without_a_ring_the_reason_is_said_at_once(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path, ring_off="the ring is off: because") as lab, RawRank(lab.socket) as rank:
        rank.save(7, b"x")
        request = {"op": "wait", "rank": 0, "attempt": 1, "step": 7, "what": "peer", "timeout_seconds": 10.0}
        assert rank.link.ask_aside(request, 10.0) == {"settled": True, "reason": "the ring is off: because"}
        status = lab.admin.status()
        assert (status.ring, status.ring_on, status.peer_shards) == ("the ring is off: because", False, ())


def test_alone_a_copy_stays_open_until_somebody_comes(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n0", "n0", "n1") as first:
        saved(first, 7)
        assert ring_of(first).outcome(0, 1, 7) is None
        assert "no other node" in first.admin.status().ring
        with ring_engine(tmp_path, "n1", "n0", "n1") as second:
            assert backed_up(first, 0, 1, 7) == ""
            assert kept(second) == [("n0", 0, 7)]


def test_a_rank_of_a_lost_node_loads_from_the_peer_wherever_it_lives_now(tmp_path: Path) -> None:
    """The shard is found by job, rank and step; neither the node nor its name matters."""
    with ring_engines(tmp_path, "n1", "n2") as (second, third):
        with ring_engine(tmp_path, "n0", "n0", "n1", "n2") as first:
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        answer = loaded(third, 7)
        assert (answer["tier"], answer["attempt"], answer["payload"]) == ("peer", 1, PAYLOAD)
        assert kept(second) == [("n0", 0, 7)], "a copy is handed out, not given away"
        assert backed_up(third, 0, 1, 7) == "", "the new home has it copied again"


def test_what_this_engine_keeps_itself_is_loaded_from_here(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n1", "n0", "n1") as second:
        with ring_engine(tmp_path, "n0", "n0", "n1") as first:
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        answer = loaded(second, 7)
        assert (answer["tier"], answer["payload"]) == ("peer", PAYLOAD)
        assert loaded(second, 7, attempt=3)["tier"] == "memory", "and stands in a slot of its own from then on"


def test_a_replaced_node_brings_back_what_was_its_own_before_anybody_asks(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n1", "n0", "n1") as second:
        with ring_engine(tmp_path, "n0", "n0", "n1") as first:
            saved(first, 7)
            saved(first, 7, rank=1)
            assert backed_up(first, 0, 1, 7) == backed_up(first, 1, 1, 7) == ""
        with ring_engine(tmp_path, "n0", "n0", "n1") as again:
            eventually(lambda: sorted(kept(again)) == [("n0", 0, 7), ("n0", 1, 7)], "its own shards")
            second.engine.stop()
            eventually(lambda: not second.socket.exists())
            assert loaded(again, 7)["payload"] == PAYLOAD


def test_a_neighbour_that_was_replaced_is_given_everything_again(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n0", "n0", "n1") as first:
        with ring_engine(tmp_path, "n1", "n0", "n1"):
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        with ring_engine(tmp_path, "n1", "n0", "n1") as second:
            eventually(lambda: kept(second) == [("n0", 0, 7)], "the ring is repaired")
        eventually(lambda: len(first.told("backed_up", 7)) == 2, "it is told again")


def test_where_a_neighbour_is_gone_for_good_the_one_behind_it_takes_its_place(tmp_path: Path) -> None:
    nodes = ("n0", "n1", "n2")
    with ring_engine(tmp_path, "n0", *nodes) as first, ring_engine(tmp_path, "n2", *nodes) as third:
        with ring_engine(tmp_path, "n1", *nodes):
            eventually(lambda: ring_of(first).couriers.targets() == ("n1",))
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        eventually(lambda: kept(third) == [("n0", 0, 7)], "n2 has it now")


def test_with_two_copies_two_neighbours_have_them(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1", "n2", "n3", replication=2) as labs:
        saved(labs[0], 7)
        assert backed_up(labs[0], 0, 1, 7) == ""
        assert [len(kept(lab)) for lab in labs] == [0, 1, 1, 0]
        told = eventually(lambda: len(labs[0].told("backed_up")) == 2 and labs[0].told("backed_up"))
        assert sorted(event.reason for event in told) == ["on n1", "on n2"]


def test_copies_go_to_another_fault_group_first(tmp_path: Path) -> None:
    groups = {"n0": "rack1", "n1": "rack1", "n2": "rack2"}
    with ring_engines(tmp_path, "n0", "n1", "n2", groups=groups) as (first, second, third):
        saved(first, 7)
        assert backed_up(first, 0, 1, 7) == ""
        assert (kept(second), kept(third)) == ([], [("n0", 0, 7)])


def test_a_copy_that_decayed_is_found_and_the_next_holder_asked(tmp_path: Path) -> None:
    nodes = ("n0", "n1", "n2", "n3")
    with contextlib.ExitStack() as stack:
        second, third, fourth = (
            stack.enter_context(ring_engine(tmp_path, node, *nodes, replication=2)) for node in nodes[1:]
        )
        with ring_engine(tmp_path, "n0", "n0", "n1", "n2", "n3", replication=2) as first:
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        ((slot, header),) = ring_of(second).store.whole()
        assert slot.segment is not None
        slot.segment.view[header.payload_offset + 100_000] ^= 1
        answer = loaded(fourth, 7)
        assert (answer["tier"], answer["payload"]) == ("peer", PAYLOAD)
        assert eventually(lambda: second.told("damaged", 7, "peer"))
        homes = [home for home, _, _ in kept(second)]
        assert "n0" not in homes, "it is never handed out again; n3, where the rank is now, may have sent its own"
        assert len(kept(third)) == 1


def test_a_decayed_only_copy_falls_to_the_disk_with_an_event(tmp_path: Path) -> None:
    with (
        ring_engine(tmp_path, "n1", "n0", "n1", "n2") as second,
        ring_engine(tmp_path, "n2", "n0", "n1", "n2") as third,
    ):
        with ring_engine(tmp_path, "n0", "n0", "n1", "n2") as first:
            saved(first, 7, world_size=1)
            assert backed_up(first, 0, 1, 7) == ""
            eventually(lambda: first.told("complete", 7))
        ((slot, header),) = ring_of(second).store.whole()
        assert slot.segment is not None
        slot.segment.view[header.payload_offset] ^= 1
        assert loaded(third, 7, world_size=1)["tier"] == "disk"
        assert eventually(lambda: second.told("damaged", 7, "peer"))
        assert "from n1" in eventually(lambda: third.told("failed", 7, "peer"))[0].reason
        assert kept(second) == []


def test_a_rejected_step_is_not_fetched(tmp_path: Path) -> None:
    with ring_engine(tmp_path, "n1", "n0", "n1") as second:
        with ring_engine(tmp_path, "n0", "n0", "n1") as first:
            saved(first, 7)
            assert backed_up(first, 0, 1, 7) == ""
        second.admin.reject_from(7, 1, "NaN")
        assert loaded(second, 7)["tier"] == ""


class Tarpit:
    """Takes connections and never says a word."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.taken: list[socket.socket] = []
        self._thread = threading.Thread(target=self._take)
        self._thread.start()

    def _take(self) -> None:
        while True:
            try:
                self.taken.append(self._listener.accept()[0])
            except OSError:
                return

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for sock in self.taken:
            sock.close()


@pytest.mark.parametrize("silent", [True, False])
def test_a_dead_or_silent_peer_costs_no_save_and_is_told_once(tmp_path: Path, silent: bool) -> None:
    tarpit = Tarpit()
    address = ("127.0.0.1", tarpit.port if silent else 1)
    try:
        ring: dict[str, Any] = {"addresses": {"n1": address}, "io_seconds_max": 0.3}
        with ring_engine(tmp_path, "n0", "n0", **ring) as first, RawRank(first.socket) as rank:
            for step in range(1, 7):
                rank.save(step, PAYLOAD)  # raises where a slot is not to be had
            (event,) = eventually(lambda: first.told("failed", tier="peer"))
            assert "n1" in event.reason
            assert "next try in" in event.reason
            eventually(lambda: "n1" in first.admin.status().ring)
            assert len(first.told("failed", tier="peer")) == 1
            assert ring_of(first).outcome(0, 1, 1) == "overtaken by step 6 before a peer had it"
            assert ring_of(first).outcome(0, 1, 6) is None
    finally:
        tarpit.close()


def test_a_save_takes_a_slot_that_is_being_sent_and_the_half_copy_is_void(tmp_path: Path) -> None:
    """A rate so low that the first copy is never through: saves go on at once, and say what that means."""
    with ring_engines(tmp_path, "n0", "n1", bytes_per_second_max=200_000) as (first, second):
        with RawRank(first.socket) as rank:
            for step in (1, 2, 3, 4):
                rank.save(step, PAYLOAD)
                eventually(lambda: ring_of(second).store._shards, "something is on its way")
            failed = eventually(lambda: first.told("failed", tier="peer"))
        assert "slower than two saves" in failed[0].reason
        assert all(step in (3, 4) for _, _, step in kept(second)), "what was sent of an overwritten slot never counts"


def test_another_token_is_refused_on_both_sides(tmp_path: Path) -> None:
    with (
        ring_engine(tmp_path, "n0", "n0", "n1") as first,
        ring_engine(tmp_path, "n1", "n0", "n1", token=b"not the token of the others") as second,
    ):
        saved(first, 7)
        assert "share one token" in eventually(lambda: first.told("failed", tier="peer"))[0].reason
        assert kept(second) == []
        eventually(lambda: "could not prove the token" in second.admin.status().ring, "the count")
        ring = ring_of(first)
        for shown in (first.engine.config, ring.couriers._caller, ring._server and ring._server._host):
            assert TOKEN.decode() not in repr(shown), "a token is in no log"


def test_strangers_neither_get_in_nor_keep_neighbours_out(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1") as (first, second):
        for raw in (b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, b""):
            with socket.create_connection(("127.0.0.1", ring_of(second).port), 5.0) as sock:
                sock.sendall(raw)
                with contextlib.suppress(OSError):  # it may have shut the door before we have spoken
                    sock.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while sock.recv(4096):
                        pass
        saved(first, 7)
        assert backed_up(first, 0, 1, 7) == ""
        eventually(lambda: "3 connections could not prove the token" in second.admin.status().ring, "the count")


def test_a_full_neighbour_says_so_and_memory_keeps_the_shard(tmp_path: Path) -> None:
    with (
        ring_engine(tmp_path, "n0", "n0", "n1") as first,
        ring_engine(tmp_path, "n1", "n0", "n1", memory_bytes_max=4096),
    ):
        saved(first, 7)
        assert "peer_memory_bytes_max" in eventually(lambda: first.told("failed", tier="peer"))[0].reason
        assert loaded(first, 7)["tier"] == "memory"


def test_a_status_tells_what_is_kept_for_whom(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1") as (first, second):
        saved(first, 7)
        assert backed_up(first, 0, 1, 7) == ""
        eventually(lambda: "copies go to n1; all are up to date" in first.admin.status().ring, "the sentence")
        status: EngineStatus = second.admin.status()
        (shard,) = status.peer_shards
        assert (shard.rank, shard.step, shard.state, shard.size_bytes) == (0, 7, "kept for n0", len(PAYLOAD))
        assert status.ring_on
        assert 0 < status.peer_memory_bytes <= status.peer_memory_bytes_max


def test_an_address_that_cannot_be_listened_on_is_said(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ring = ring_config("n0", "n1", listen_port=taken.getsockname()[1])
        engine = Engine(EngineConfig("job", "n0", tmp_path / "n0.sock", tmp_path / "ck", ring=ring), lambda event: None)
        with pytest.raises(EngineRefused, match="cannot listen"):
            engine.run()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"token": b"short"}, "at least 16 bytes"),
        ({"listen_host": "0.0.0.0"}, "advertise_host"),
        ({"replication": 0}, "at least 1"),
        ({"chunk_bytes": 1}, "a chunk must have"),
        ({"nodes": ("../n0",)}, "cannot be the name"),
    ],
)
def test_what_cannot_be_is_refused_in_a_sentence(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        RingConfig(**{"token": TOKEN, **options})
