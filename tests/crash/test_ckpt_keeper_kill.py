"""Engines, keepers and ranks killed with a keeper there: memory outlives each of them, and every two but all three."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ckpt_engine.admin import EngineAdmin
from ckpt_engine.errors import EngineUnavailable
from ckpt_engine.manifest import complete_steps
from ingest.clock import SystemClock
from pipelines.ckpt_kills import VICTIMS, kill_at_random
from tests.ckpt_lab import ROOT, EngineProcess, RawRank, engine_in_thread, eventually, fill_segment, raw_header
from tests.keeper_lab import OfferingRank, is_gone, settled_keeper, status_of

KEEPER_SECONDS = 30.0
KILLS = 20  # a tenth of what the benchmark does


def shards(engine: EngineProcess) -> list[int]:
    return [shard.step for shard in EngineAdmin(engine.socket).status().shards]


def memory_of(engine: EngineProcess) -> int:
    return EngineAdmin(engine.socket).status().memory_bytes


def test_an_engine_killed_with_all_ranks_dead_has_lost_nothing(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine, RawRank(engine.socket) as rank:
        for step in (1, 2):
            rank.save(step, b"%d" % step * 1000)
        before = memory_of(engine)
        keeper = settled_keeper(engine.socket, 2)
        rank.close()
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == [2, 1]
        assert memory_of(engine) == before
        assert settled_keeper(engine.socket, 2) == keeper
        with RawRank(engine.socket, attempt=2) as reborn:
            answer = reborn.load(2)
            assert (answer["tier"], answer["payload"]) == ("memory", b"2" * 1000)
            reborn.save(3, b"3" * 1000)
            assert reborn.load(None)["step"] == 3
        registered = [event for event in engine.events() if event[0] == "registered" and event[1] > 0]
        assert [event[1] for event in registered] == [2, 1]
        assert engine.end(signal.SIGTERM) == 0
    assert is_gone(keeper), "an engine that has brought everything to disk takes its keeper along"
    assert [path.name for path in tmp_path.iterdir() if path.suffix in (".sock", ".keep")] == []


def test_a_half_written_slot_is_void_and_the_one_before_it_whole(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine, RawRank(engine.socket) as rank:
        rank.save(1, b"good" * 500)
        _, _, view = rank.acquire(2, 2000)
        view[-2000:] = b"t" * 2000
        settled_keeper(engine.socket, 2)
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine, RawRank(engine.socket, attempt=2) as reborn:
        assert shards(engine) == [1]
        assert reborn.load(None)["payload"] == b"good" * 500
        before = memory_of(engine)
        reborn.save(2, b"anew" * 500)
        assert memory_of(engine) == before, "the void slot is used for it"
        assert engine.end(signal.SIGTERM) == 0


def test_a_save_that_ends_while_no_engine_is_there_counts(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        rank = RawRank(engine.socket)
        rank.save(1, b"one")
        _, _, view = rank.acquire(2, 3)
        settled_keeper(engine.socket, 2)
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == [1]
        fill_segment(view, *raw_header(2, 3, rank.identity), b"two")  # and the rank dies without a word
        assert shards(engine) == [2, 1]
        rank.close()
        assert engine.end(signal.SIGTERM) == 0
    assert complete_steps(engine.directory)[-1].step == 2


def test_keeper_and_engine_killed_one_after_the_other(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine, RawRank(engine.socket) as rank:
        rank.save(1, b"one")
        rank.save(2, b"two")
        first = settled_keeper(engine.socket, 2)
        os.kill(first, signal.SIGKILL)
        second = settled_keeper(engine.socket, 2, but=first)
        assert rank.load(2)["payload"] == b"two", "the keeper alone loses nothing"
        rank.close()
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == [2, 1]
        assert settled_keeper(engine.socket, 2) == second
        assert engine.end(signal.SIGTERM) == 0


def test_keeper_and_engine_killed_together_while_a_rank_lives(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        rank = OfferingRank(engine.socket)
        rank.save(1, b"one")
        rank.save(2, b"two")
        keeper = settled_keeper(engine.socket, 2)
        engine.process.send_signal(signal.SIGSTOP)  # it must not start another meanwhile
        os.kill(keeper, signal.SIGKILL)
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == []
        eventually(lambda: _saved(rank, 3))
        assert shards(engine) == [3, 2]
        settled_keeper(engine.socket, 2)
        rank.close()
        assert engine.end(signal.SIGTERM) == 0


def _saved(rank: RawRank, step: int) -> bool:
    try:
        rank.save(step, b"new")
    except EngineUnavailable:
        return False
    return True


def test_a_rank_that_lives_over_an_engines_death_does_not_double_the_memory(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        rank = OfferingRank(engine.socket)
        rank.save(1, b"one")
        rank.save(2, b"two")
        before = memory_of(engine)
        settled_keeper(engine.socket, 2)
        engine.end(signal.SIGKILL)
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == [2, 1]
        eventually(lambda: _saved(rank, 3))
        assert rank.generations
        assert all(rank.generations), "both segments are recognised"
        assert memory_of(engine) == before
        assert shards(engine) == [3, 2]
        rank.close()
        assert engine.end(signal.SIGTERM) == 0


def test_what_the_disk_does_not_take_stays_with_the_keeper_when_the_engine_is_told_to_end(tmp_path: Path) -> None:
    (tmp_path / "ck").write_text("no folder")
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine, RawRank(engine.socket) as rank:
        rank.save(1, b"only in memory")
        keeper = settled_keeper(engine.socket, 2)
        assert engine.end(signal.SIGTERM) == 0
        assert status_of(engine.socket)["kept"] == 2
    (tmp_path / "ck").unlink()
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        assert shards(engine) == [1]
        assert engine.end(signal.SIGTERM) == 0
    assert [record.step for record in complete_steps(engine.directory)] == [1]
    assert is_gone(keeper)


EXITS_AT_ONCE = """
import os, sys
from pathlib import Path
from tests.ckpt_lab import RawRank
RawRank(Path(sys.argv[1])).save(1, b"last words" * 1000)
os._exit(0)
"""


def test_a_trainer_that_exits_right_after_its_save_has_lost_nothing(tmp_path: Path) -> None:
    with EngineProcess(tmp_path, keeper_seconds=KEEPER_SECONDS) as engine:
        subprocess.run([sys.executable, "-c", EXITS_AT_ONCE, str(engine.socket)], cwd=ROOT, check=True, timeout=60)
        assert shards(engine) == [1]
        assert engine.end(signal.SIGTERM) == 0
    assert [record.step for record in complete_steps(engine.directory)] == [1]


LEAVES_ITS_CONNECTION_TO_A_CHILD = """
import os, sys, time
from pathlib import Path
from tests.ckpt_lab import RawRank
rank = RawRank(Path(sys.argv[1]))
rank.save(1, b"good")
rank.acquire(2, 4)
os.set_inheritable(rank.link._sock.fileno(), True)
child = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "input()"], {})
print(child, flush=True)
time.sleep(600)
"""


def test_the_death_of_a_rank_is_seen_although_a_child_of_it_holds_the_connection(tmp_path: Path) -> None:
    with engine_in_thread(tmp_path) as lab:
        rank = subprocess.Popen(
            [sys.executable, "-c", LEAVES_ITS_CONNECTION_TO_A_CHILD, str(lab.socket)], cwd=ROOT,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with rank:
            assert rank.stdout is not None
            child = int(rank.stdout.readline())
            assert len(lab.engine._sessions) == 1
            rank.kill()
            eventually(lambda: not lab.engine._sessions, "the end of its session")
            assert not is_gone(child)
            os.kill(child, signal.SIGKILL)
        assert [shard.step for shard in lab.admin.status().shards] == [1], "what it was writing is void"


def test_a_second_engine_says_who_serves_the_socket(tmp_path: Path) -> None:
    with EngineProcess(tmp_path) as engine:
        program = (
            "import sys; from pathlib import Path; from ckpt_engine.engine import Engine, EngineConfig\n"
            "Engine(EngineConfig('job', 'n0', Path(sys.argv[1]), Path(sys.argv[2])), print).run()"
        )
        command = [sys.executable, "-c", program, str(engine.socket), str(engine.directory)]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert second.returncode == 1
        assert f"another engine serves {engine.socket} (process {engine.process.pid})" in second.stderr
        assert shards(engine) == [], "the first one goes on"


@pytest.mark.parametrize("seed", [5])
def test_kills_at_random_instants_cost_at_most_one_save_and_never_a_byte(tmp_path: Path, seed: int) -> None:
    counts = kill_at_random(tmp_path, kills=KILLS, seed=seed, clock=SystemClock(), payload_bytes=2 << 20)
    assert counts.kills == KILLS
    assert (counts.torn, counts.engine_kill_lost) == (0, 0), counts
    assert counts.saves_lost_max <= 1, counts
    assert set(counts.by_victim) <= set(VICTIMS)
    assert len(counts.by_victim) >= 4
    assert counts.loads >= KILLS // 2
    assert counts.by_tier["memory"] >= KILLS // 3, counts
    assert counts.copies >= KILLS // 2, "the other node had copies all the time, and every one of them was a whole save"
