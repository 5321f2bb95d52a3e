"""A diagnosis names what broke first, who it was, and what was only a consequence."""

from __future__ import annotations

import pytest

from detectors.diagnosis import diagnosis, sightings
from detectors.diagnosis.diagnosis import Diagnoser, Diagnosis
from detectors.diagnosis.first_cause import who_is_behind, who_is_missing
from detectors.diagnosis.places import listen, speaker_of_file
from detectors.diagnosis.sightings import STORM_LINES, Sighting
from detectors.logs.rule_book import RuleBook

RULES = RuleBook.shipped()
OOM = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."


def waited(rank: int, number: int = 40, at: str = "10:00:00.000000001") -> str:
    said = f"[Rank {rank}] Watchdog caught collective operation timeout: WorkNCCL(SeqNum={number}, OpType=ALLREDUCE, "
    said += "NumelIn=1, NumelOut=1, Timeout(ms)=600000) ran for 600003 milliseconds before timing out."
    return f"[rank{rank}]:[E402 {at} ProcessGroupNCCL.cpp:632] {said}"


def step(number: int, loss: str = "2.5") -> str:
    return f"step {number} | loss {loss} | lr 1e-4"


def diagnose(*lines: str, **files: tuple[str, ...]) -> Diagnosis:
    """One source of `lines`, or several by name (`__` in a name stands for a dot)."""
    diagnoser = Diagnoser(RULES)
    for name, said in {"train.log": lines, **files}.items():
        if said:
            diagnoser.feed_lines(name.replace("__", "."), said)
    return diagnoser.conclude()


def test_the_root_beats_those_who_wait_for_it_wherever_it_stands() -> None:
    found = diagnose(waited(0), waited(2), f"[rank1]: {OOM}", waited(3))
    assert (found.symptom, found.rank, found.action) == ("cuda_oom", 1, "stop")
    assert [(one.symptom, one.count, one.ranks) for one in found.consequences] == [("nccl_timeout", 3, (0, 2, 3))]
    assert found.lines[0].line == 3
    assert "3 other ranks" in found.summary


def test_of_two_roots_the_earlier_by_time_is_the_cause_not_the_one_read_first() -> None:
    found = diagnose(
        rank_0__log=("[rank0]: 2025-04-02 10:00:09 ERROR RuntimeError: CUDA error: unspecified launch failure",),
        rank_7__log=("[rank7]: 2025-04-02 10:00:02 ERROR OSError: [Errno 28] No space left on device",),
    )
    assert (found.symptom, found.rank) == ("disk_full", 7)


def test_a_line_of_the_kernel_explains_the_cuda_error_that_was_seen_before_it() -> None:
    found = diagnose(
        "[rank6]: RuntimeError: CUDA error: unknown error",
        "[991822.101022] NVRM: Xid (PCI:0000:a1:00): 79, pid=5512, GPU has fallen off the bus.",
    )
    assert (found.symptom, found.device) == ("gpu_off_bus", "0000:a1:00")
    assert [one.symptom for one in found.consequences] == ["cuda_error_other"]


def test_a_kernel_line_of_another_node_explains_nothing() -> None:
    found = diagnose(
        "2025-04-02T08:14:50+00:00 n1 trainer[9]: [rank1]: RuntimeError: CUDA error: unspecified launch failure",
        "2025-04-02T08:14:55+00:00 n2 kernel: NVRM: Xid (PCI:0000:c1:00): 79, pid=7, GPU has fallen off the bus.",
    )
    assert (found.symptom, found.node) == ("cuda_error_other", "n1")


def test_a_kill_is_explained_by_the_kernel_and_the_rank_that_vanished_is_named() -> None:
    found = diagnose(
        "[rank5]: RuntimeError: DataLoader worker (pid 7712) is killed by signal: Killed.",
        "[70012.331] Out of memory: Killed process 7712 (pt_data_worker) total-vm:33312244kB, anon-rss:2kB",
    )
    assert (found.symptom, found.rank) == ("host_oom", 5)


def test_a_kill_after_a_time_out_was_the_launchers_doing() -> None:
    killed = "E0402 10:00:31.0 88 api.py:874] failed (exitcode: -9) local_rank: 0 (pid: 12) of binary: /usr/bin/python"
    assert diagnose(waited(1), killed).symptom == "nccl_timeout"
    assert diagnose(killed, waited(1, at="10:10:00.0")).symptom == "sigkill_unknown"


def test_torchruns_summary_tells_rank_and_host_of_a_kill() -> None:
    found = diagnose(
        "E0402 10:00:31.0 88 api.py:874] failed (exitcode: -9) local_rank: 3 (pid: 604) of binary: /usr/bin/python",
        "  host      : trainer-2",
        "  rank      : 19 (local_rank: 3)",
        "  exitcode  : -9 (pid: 604)",
    )
    assert (found.rank, found.node) == (19, "trainer-2")


def test_the_rank_whose_collective_is_far_behind_is_the_culprit() -> None:
    found = diagnose(waited(0, 502), waited(1, 502), waited(2, 417))
    assert (found.symptom, found.rank, found.action) == ("nccl_timeout", 2, "diagnose_then_restart")
    assert "85 collectives behind" in found.summary


def test_who_is_behind_is_unknown_where_it_is_the_majority() -> None:
    assert who_is_behind({("", rank): 640 if rank else 641 for rank in range(5)}) is None
    assert who_is_behind({("", 0): 5, ("", 1): 5}) is None
    behind = who_is_behind({("", 0): 9, ("", 1): 9, ("", 2): 4, ("tp", 0): 1, ("tp", 1): 1})
    assert behind is not None
    assert (behind.ranks, behind.completed, behind.others) == ((2,), 4, 9)


def test_the_one_rank_that_does_not_say_that_it_waited_is_the_suspect() -> None:
    assert who_is_missing([0, 1, 3], [0, 1, 2, 3]) == 2
    assert who_is_missing([0, 4], []) is None, "three are missing: nobody is named"
    assert who_is_missing([0, 2], []) is None, "two voices are too few"
    assert diagnose(waited(0), waited(1), waited(3)).rank == 2
    assert diagnose(waited(0), waited(4)).rank is None


def test_the_peer_that_a_socket_names_is_the_suspect_and_not_who_says_so() -> None:
    found = diagnose(
        "node7 [5] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to send to 10.0.0.151<52905> failed : "
        "Connection reset by peer"
    )
    assert (found.symptom, found.suspects, found.node, found.rank) == ("conn_reset", ("10.0.0.151",), "", None)


def test_the_same_exception_on_all_ranks_is_the_programs_and_on_one_rank_that_ranks() -> None:
    everywhere = diagnose(*(f"[rank{rank}]: TypeError: forward() got an unexpected argument" for rank in range(4)))
    assert (everywhere.workload, everywhere.rank, everywhere.action) == (True, None, "stop")
    one = diagnose("[rank3]: IndexError: list index out of range", waited(0), waited(1), waited(2))
    assert (one.workload, one.rank) == (False, 3)


def test_an_exception_gives_way_to_what_the_same_rank_says_right_behind_it() -> None:
    chained = ("[rank1]: KeyError: 'cache'", "[rank1]: During handling of the above exception, another occurred:")
    assert diagnose(*chained, f"[rank1]: {OOM}").symptom == "cuda_oom"
    assert diagnose(*chained, *["[rank1]: and then"] * 300, f"[rank1]: {OOM}").symptom == "python_exception"


def test_what_the_job_went_on_after_is_not_the_cause() -> None:
    found = diagnose(step(10), f"[rank2]: {OOM}", step(11), step(12), step(13))
    assert (found.found, found.action) == (False, "none")
    assert [one.symptom for one in found.recovered] == ["cuda_oom"]
    assert "went on after" in found.summary


def test_the_last_episode_counts() -> None:
    found = diagnose(
        step(10), f"[rank2]: {OOM}", step(11), step(12), "[rank0]: OSError: [Errno 122] Disk quota exceeded"
    )
    assert (found.symptom, found.last_step, found.last_loss) == ("disk_full", 12, 2.5)
    assert [one.symptom for one in found.recovered] == ["cuda_oom"]


def test_one_more_line_of_progress_is_no_recovery() -> None:
    assert diagnose(step(10), f"[rank2]: {OOM}", step(11)).symptom == "cuda_oom"


def test_progress_that_a_dying_process_flushes_is_no_recovery() -> None:
    late = [f" [2025-04-02 09:59:{second}] iteration {second}/ 100 | lm loss: 2.0E+00 |" for second in range(10, 14)]
    died = f"2025-04-02 10:00:00 [rank1]: {OOM}"
    assert diagnose(died, *late).symptom == "cuda_oom"


def test_numbers_that_stay_bad_are_no_recovery_and_one_bad_number_is() -> None:
    assert diagnose(step(1), step(2, "nan"), step(3, "nan"), step(4, "nan")).symptom == "loss_nan"
    assert not diagnose(step(1), step(2, "nan"), step(3), step(4), step(5)).found


def test_an_attempt_that_a_later_one_followed_is_not_the_cause() -> None:
    diagnoser = Diagnoser(RULES)
    diagnoser.feed_lines("log/attempt_0/3/stderr.log", [f"[rank3]: {OOM}"])
    diagnoser.feed_lines("log/attempt_1/0/stdout.log", [step(10), step(11), step(12)])
    diagnoser.feed_lines("log/attempt_1/5/stderr.log", ["[rank5]: PermissionError: [Errno 13] Permission denied: '/x'"])
    found = diagnoser.conclude()
    assert (found.symptom, found.rank) == ("permission", 5)
    assert [one.symptom for one in found.recovered] == ["cuda_oom"]


def test_steps_in_another_file_after_a_failure_tell_that_it_was_survived() -> None:
    def progress(second: int) -> str:
        return f" [2025-04-02 10:{second // 60:02d}:{second % 60:02d}] iteration {second}/ 9999 | lm loss: 2.0E+00 |"

    reset = "2025-04-02 10:00:20 h1 [0] socket.cc:4 NCCL WARN Call to recv from 10.0.0.9<4> failed : Broken pipe"
    longer = tuple(progress(second) for second in range(1, 3000))
    found = diagnose(rank_0__log=longer * 2, rank_1__log=(reset,))
    assert not found.found
    assert [one.symptom for one in found.recovered] == ["conn_reset"]


def test_an_error_that_python_prints_while_it_tears_down_ends_nothing() -> None:
    ignored = "Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f00>"
    worker = "RuntimeError: DataLoader worker (pid 4141) is killed by signal: Killed. "
    trace = ["Traceback (most recent call last):", '  File "dataloader.py", line 1604, in __del__', "    self.stop()"]
    assert not diagnose(ignored, *trace, worker).found
    assert diagnose(ignored, *trace, worker, worker).symptom == "dataloader_killed"
    assert diagnose(ignored, *["and on it goes"] * 100, worker).symptom == "dataloader_killed"


def test_a_warning_is_named_only_where_nothing_broke() -> None:
    corrected = "[10.000316] pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0"
    assert diagnose(corrected).symptom == "pcie_corrected"
    assert diagnose(corrected, f"[rank1]: {OOM}").symptom == "cuda_oom"


def test_lines_at_a_level_of_those_who_go_on_are_no_cause() -> None:
    assert not diagnose("WARNING:root:FileNotFoundError: [Errno 2] No such file or directory: 'x'").found
    assert not diagnose("2025-01-01 10:00:00 INFO cache: PermissionError: [Errno 13] Permission denied: '/x'").found


def test_nothing_found_is_a_legal_answer_that_says_what_was_looked_at() -> None:
    found = diagnose(step(1), step(2), "all done")
    assert not found.found
    assert found.summary == "No cause found in 3 lines of one source. The last step seen was 2."
    assert Diagnoser().conclude().summary == "Nothing was read: there is no log in what was given."


def test_a_flood_of_sufferers_hides_no_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sightings, "SIGHTINGS_MAX", 100)
    flood = [waited(rank, 40 + rank % 7) for rank in range(150)]
    found = diagnose(*flood, f"[rank1]: {OOM}")
    assert (found.symptom, found.rank) == ("cuda_oom", 1)


def test_lines_alike_but_for_numbers_are_only_counted_and_codes_never_are() -> None:
    lines = [f"node3:118:{n} [2] NCCL WARN NET/IB : Got async event : port error" for n in range(STORM_LINES + 50)]
    assert diagnose(*lines).symptom == "ib_flap"
    xids = [f"NVRM: Xid (PCI:0000:1a:00): 43, pid={n}, Ch 00000008" for n in range(STORM_LINES + 50)]
    assert (
        diagnose(*xids, "NVRM: Xid (PCI:0000:1a:00): 79, pid=7, GPU has fallen off the bus.").symptom == "gpu_off_bus"
    )


def test_a_time_out_printed_behind_a_progress_bar_is_heard_with_its_rank() -> None:
    found = diagnose("  1%|▏         | 24/1752 [01:08<1:22:56,  2.88s/it]" + waited(5), "")
    assert (found.symptom, found.lines[0].rank) == ("nccl_timeout", 5)


@pytest.mark.parametrize(
    ("name", "rank", "node", "local", "attempt"),
    [
        ("logs/attempt_0/3/stderr.log", None, "", 3, 1),
        ("node-7/attempt_2/11/stdout.log", None, "node-7", 11, 3),
        ("out/rank_3.log", 3, "", None, 0),
        ("out/rank-12.err", 12, "", None, 0),
        ("node-7.log", None, "node-7", None, 0),
        ("logs/worker-5.txt", None, "worker-5", None, 0),
        ("worker-5/rank_40.log", 40, "worker-5", None, 0),
        ("slurm-123_4.out", None, "", None, 0),
        ("slurm-123-n0042-7.out", 7, "n0042", None, 0),
        ("slurm-123-n0042.out", None, "n0042", None, 0),
        ("dmesg-gpu17.log", None, "gpu17", None, 0),
        ("train.log", None, "", None, 0),
    ],
)
def test_what_the_name_of_a_file_tells(name: str, rank: int | None, node: str, local: int | None, attempt: int) -> None:
    told = speaker_of_file(name)
    assert (told.rank, told.node, told.local, told.attempt) == (rank, node, local, attempt)


@pytest.mark.parametrize(
    ("line", "rank", "node", "local", "text"),
    [
        ("[rank3]: words", 3, "", None, "words"),
        ("[default3]:words", None, "", 3, "words"),
        ("3: words", 3, "", None, "words"),
        ("12: [rank3]: words", 3, "", None, "words"),
        ("[1,7]<stderr>: words", 7, "", None, "words"),
        ("(RayTrainWorker pid=41, ip=10.1.2.3) words", None, "10.1.2.3", None, "words"),
        ("node7:118:320 [2] NCCL WARN x", None, "node7", 2, "node7:118:320 [2] NCCL WARN x"),
        ("[PG ID 0 PG GUID 0(default_pg) Rank 7] words", 7, "", None, "[PG ID 0 PG GUID 0(default_pg) Rank 7] words"),
        ("Mar 21 02:07:08 node7 kernel: words", None, "node7", None, "words"),
        ("2025-04-02T08:14:55.120345+00:00 tr-07 kernel: words", None, "tr-07", None, "words"),
        ("worker-3  | words", None, "worker-3", None, "words"),
        ("[74889.542031] words", None, "", None, "words"),
        ("2024-04-20T09:09:37.123456789Z stderr F [rank2]: words", 2, "", None, "words"),
        ('{"log": "[rank3]: words\\n", "stream": "stderr", "time": "2024-04-20T09:09:37Z"}', 3, "", None, "words"),
        ("srun: error: n12: task 7: Killed", 7, "n12", None, "srun: error: n12: task 7: Killed"),
    ],
)
def test_who_says_a_line(line: str, rank: int | None, node: str, local: int | None, text: str) -> None:
    said = listen(line)
    assert (said.speaker.rank, said.speaker.node, said.speaker.local, said.text) == (rank, node, local, text)


@pytest.mark.parametrize(
    "line",
    [
        "[rank0]:[E321 02:07:08.4 x.cpp:607] words",
        "E0321 02:07:08.400 4000 api.py:1] words",
        "2024-03-21 02:07:08,400 - x - ERROR - words",
        "2024-03-21T02:07:08.400Z stderr F words",
        "Mar 21 02:07:08.4 node7 kernel: words",
        "[Thu Mar 21 02:07:08.4 2024] words",
        "03/21/2024 02:07:08.4 - INFO - words",
    ],
)
def test_when_a_line_was_said(line: str) -> None:
    stamp = listen(line).stamp
    assert stamp is not None
    assert stamp.seconds % 86_400 == pytest.approx(2 * 3600 + 7 * 60 + 8.4)
    assert stamp.year in (0, 2024)


def test_a_thousand_sources_are_weighed_without_asking_each_of_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    sources, asked, diagnoser = 200, [0], Diagnoser(RULES)
    pad = "x" * 270_000  # two blocks of progress
    for rank in range(sources):
        begun = f"2025-04-02 10:00:00 step {rank} | loss 2.5"
        more = f"2025-04-02 10:00:01 step {rank + 9} | loss 2.5"
        diagnoser.feed_lines(f"rank_{rank}.log", (begun, pad, more, f"2025-04-02 10:00:09 ERROR [rank{rank}]: {OOM}"))
        diagnoser.end(f"rank_{rank}.log")
    earlier = diagnosis._earlier

    def counted(*stamps: object) -> bool:
        asked[0] += 1
        return earlier(*stamps)

    monkeypatch.setattr(diagnosis, "_earlier", counted)
    monkeypatch.setattr(Sighting, "__eq__", None)  # one look at what a sighting is, not at all it holds
    found = diagnoser.conclude()
    assert (found.symptom, found.rank) == ("cuda_oom", 0)
    assert asked[0] <= 4 * sources
    assert not any(source._shapes for source in diagnoser._read)


def test_two_nodes_that_fail_in_the_same_second_make_the_first_of_them_less_sure() -> None:
    def sure(second: str, node: str) -> float:
        return diagnose(
            n1__log=("2025-04-02T10:00:02+00:00 n1 train[9]: [rank0]: OSError: [Errno 28] No space left on device",),
            n2__log=(f"2025-04-02T10:00:{second}+00:00 {node} train[9]: [rank9]: {OOM}",),
        ).confidence

    assert sure("02", "n2") < sure("04", "n2") == sure("02", "n1")


def test_a_rank_within_a_process_group_is_not_the_rank_of_the_job() -> None:
    def behind(rank: int, group: int, within: int, completed: int) -> str:
        return (
            f"[rank{rank}]:[E402 10:00:00.1 ProcessGroupNCCL.cpp:2268] [PG ID 2 PG GUID {group} Rank {within}]  failure"
            f" detected by watchdog at work sequence id: {completed + 1} PG status: last enqueued work:"
            f" {completed + 9}, last completed work: {completed}"
        )

    found = diagnose(behind(4, 4, 0, 100), behind(5, 4, 1, 100), behind(6, 5, 0, 100), behind(7, 5, 1, 63))
    assert (found.symptom, found.rank) == ("nccl_timeout", 7)


def test_all_victims_are_counted_though_few_are_listed() -> None:
    found = diagnose(f"[rank7]: {OOM}", *(waited(rank) for rank in range(40)))
    assert (found.victims, len(found.consequences[0].ranks)) == (39, 16)
    assert "39 other ranks only suffered from it." in found.summary
