"""Stacks into groups and a culprit; sequence numbers into who is behind; a flight recorder's dump into numbers."""

from __future__ import annotations

import json

import pytest

from detectors.silence.sequence_numbers import GATE, parse_watchdog
from detectors.silence.stack_groups import Stand, behind_of, groups_of, main_frames, odd_of, ranks_words, stand_of
from ingest.flight_recorder import Flight, parse_dump

SITE = "/venv/lib/python3.12/site-packages"
REPORTER = """Thread 0x00007f1e2d7fa6c0 (most recent call first):
  File "/usr/lib/python3.12/threading.py", line 359 in wait
  File "/app/ingest/reporter.py", line 160 in _work
  File "/usr/lib/python3.12/threading.py", line 1030 in _bootstrap_inner
  File "/usr/lib/python3.12/threading.py", line 1002 in _bootstrap

"""
WAITS = f"""{REPORTER}Current thread 0x00007f1e3c1ff740 (most recent call first):
  File "{SITE}/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "{SITE}/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/user/train.py", line 41 in main
  File "/user/train.py", line 60 in <module>
"""
LOADS = f"""{REPORTER}Thread 0x00007f1e3c1ff740 [python] (most recent call first):
  File "/usr/lib/python3.12/selectors.py", line 415 in select
  File "/usr/lib/python3.12/multiprocessing/connection.py", line 1136 in wait
  File "/usr/lib/python3.12/multiprocessing/queues.py", line 113 in get
  File "{SITE}/torch/utils/data/dataloader.py", line 1243 in _try_get_data
  File "{SITE}/torch/utils/data/dataloader.py", line 701 in __next__
  File "/user/train.py", line 33 in main
"""
BACKWARD = f"""Current thread 0x00007f1e3c1ff740 (most recent call first):
  File "{SITE}/torch/autograd/graph.py", line 841 in _engine_run_backward
  File "{SITE}/torch/_tensor.py", line 626 in backward
  File "/user/train.py", line 39 in main
"""


def stand(rank: int, stacks: str, *, in_collective: bool = False, state: str = "S") -> Stand:
    return stand_of(rank, f"node{rank // 4}", stacks, in_collective=in_collective, state=state, wchan="futex_wait")


def test_the_main_thread_is_found_among_others_whichever_is_current() -> None:
    assert main_frames(LOADS)[-1] == ("/user/train.py", "main")
    swapped = LOADS.replace("Thread 0x00007f1e2d7fa6c0", "Current thread 0x00007f1e2d7fa6c0")
    assert main_frames(swapped) == main_frames(LOADS)
    assert main_frames("") == main_frames("nothing of the kind\n  at all") == ()


def test_line_numbers_addresses_and_other_threads_do_not_tell_stacks_apart() -> None:
    other = LOADS.replace("0x00007f1e3c1ff740", "0x00007fffffffff00").replace("line 33", "line 34")
    assert len(groups_of([stand(0, LOADS), stand(1, other.removeprefix(REPORTER))])) == 1


def test_the_rank_in_its_data_loader_is_waited_for_by_those_in_a_collective() -> None:
    groups = groups_of([stand(rank, LOADS if rank == 3 else WAITS) for rank in range(31)])
    assert [(group.kind, len(group.ranks)) for group in groups] == [("collective", 30), ("data", 1)]
    pointing = odd_of(groups)
    assert (pointing.ranks, pointing.confidence) == ((3,), 0.7)
    assert f"rank 3 {pointing.reason}" == "rank 3 stands in dataloader.py:_try_get_data, 30 others in all_reduce"


def test_a_backward_pass_is_a_collective_only_where_the_rank_says_that_it_waits() -> None:
    assert stand(0, BACKWARD, in_collective=True).kind == "collective"
    assert stand(0, BACKWARD, in_collective=False).kind == "elsewhere"


def test_the_rank_without_an_answer_is_named_before_all_others() -> None:
    stands = [stand(0, WAITS), stand(1, LOADS), stand(2, "", state="D"), stand(3, WAITS)]
    pointing = odd_of(groups_of(stands))
    assert pointing.ranks == (2,)
    assert pointing.confidence == 0.9
    assert "process state D in futex_wait" in pointing.reason


@pytest.mark.parametrize("away", [3, 4])
def test_the_larger_side_is_never_the_culprit(away: int) -> None:
    stands = [stand(rank, LOADS if rank < away else WAITS) for rank in range(5)]
    assert odd_of(groups_of(stands)).ranks == ()


def test_all_in_one_place_and_all_silent_point_at_nobody() -> None:
    assert odd_of(groups_of([stand(rank, WAITS) for rank in range(4)])).ranks == ()
    assert odd_of(groups_of([stand(rank, "") for rank in range(4)])).ranks == ()


def test_one_rank_in_another_collective_is_the_odd_one() -> None:
    barrier = WAITS.replace("in all_reduce", "in barrier")
    pointing = odd_of(groups_of([stand(rank, barrier if rank == 1 else WAITS) for rank in range(4)]))
    assert (pointing.ranks, pointing.confidence) == ((1,), 0.6)


def test_runs_of_ranks_are_said_together() -> None:
    assert ranks_words([0, 1, 2, 5]) == "ranks 0-2, 5"
    assert ranks_words([7]) == "rank 7"


LINE = (
    "[rank{rank}]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] [Rank {rank}] Watchdog caught collective operation"
    " timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, NumelIn=466119168, NumelOut=466119168, Timeout(ms)=600000)"
    " ran for 600060 milliseconds before timing out."
)
WORK = (
    "[rank0]:[E321 02:07:08.465150152 ProcessGroupNCCL.cpp:1664] [PG ID 0 PG GUID 0(default_pg) Rank 0] Exception"
    " (either an error or timeout) detected by watchdog at work: 1580, last enqueued NCCL work: 1582, last completed"
    " NCCL work: 1579."
)


def test_watchdog_lines_tell_numbers_and_process_group() -> None:
    told = parse_watchdog(LINE.format(rank=4, number=1580))
    assert told is not None
    assert (told.group, told.rank, told.number, told.collective) == ("", 4, 1580, "allreduce")
    work = parse_watchdog(WORK)
    assert work is not None
    assert (work.group, work.rank, work.enqueued, work.completed) == ("0(default_pg)", 0, 1582, 1579)
    newer = parse_watchdog(
        "[rank2]:[E1129 01:58:45.5 ProcessGroupNCCL.cpp:2268] [PG ID 1 PG GUID 3 Rank 2]  failure detected by watchdog"
        " at work sequence id: 45390 PG status: last enqueued work: 45403, last completed work: 45389"
    )
    assert newer is not None
    assert (newer.group, newer.rank, newer.enqueued, newer.completed) == ("3", 2, 45403, 45389)
    dumps = parse_watchdog("[Rank 2] a dump signal. Last enqueued NCCL work: 1202, last completed NCCL work: 1201.")
    assert dumps is not None
    assert (dumps.enqueued, dumps.completed) == (1202, 1201)
    assert parse_watchdog("timeout=1800s configured for process group; NCCL watchdog enabled") is None
    assert all(any(piece in line for piece in GATE) for line in (LINE, WORK))


@pytest.mark.parametrize(
    ("numbers", "ranks"),
    [
        ({0: 1203, 1: 1203, 2: 1041, 3: 1203}, (2,)),
        ({0: 100, 1: 63}, (1,)),  # two lines can carry all the evidence
        (dict.fromkeys(range(4), 1580), ()),
        ({**dict.fromkeys(range(30), 640), 30: 641, 31: 641}, ()),  # NVIDIA/nccl issue 1911
        ({**dict.fromkeys(range(20), 640), **dict.fromkeys(range(20, 31), 641), 31: 63}, (31,)),
    ],
)
def test_who_is_behind_is_named_unless_it_is_the_larger_side(numbers: dict[int, int], ranks: tuple[int, ...]) -> None:
    assert behind_of(numbers).ranks == ranks


def dump(*entries: dict[str, object]) -> bytes:
    return json.dumps({"version": "2.10", "entries": entries, "pg_config": {}}).encode()


def entry(number: int, state: str, group: str = "default_pg", **other: object) -> dict[str, object]:
    name = {"process_group": ["0", group], "profiling_name": "nccl:all_reduce", "is_p2p": False}
    return {**name, "collective_seq_id": number, "state": state, "input_sizes": [[2]], **other}


def test_a_flight_recorders_dump_tells_the_newest_collective_of_the_default_group() -> None:
    told = parse_dump(
        dump(entry(7, "completed"), entry(8, "started"), entry(9, "scheduled"), entry(99, "started", "mesh_tp"))
    )
    assert told == Flight(collective="all_reduce", enqueued=9, completed=7)


def test_a_backend_that_completes_nothing_tells_only_what_was_enqueued() -> None:
    assert parse_dump(dump(entry(3, "scheduled", profiling_name="gloo:barrier"))) == Flight(
        collective="barrier", enqueued=3, completed=None
    )


@pytest.mark.parametrize("garbage", [b"", b"\x80\x04\x95pickle", b"[]", b'{"entries": 3}', dump(), dump({"a": 1})])
def test_what_is_no_dump_tells_nothing(garbage: bytes) -> None:
    assert parse_dump(garbage) is None
