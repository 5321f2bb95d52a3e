"""The log book: storms folded and bounded, GPUs named twice, what is announced as handled, what is new to a job."""

from __future__ import annotations

from itertools import pairwise

import msgspec

from detectors.logs.book import LogBook
from detectors.logs.memory import NOVEL_LINES_MIN, NOVEL_MAX
from detectors.logs.rule_book import RuleBook
from detectors.logs.storms import FOLDS_MAX, SPREAD_RANKS_MAX, LogStorms
from detectors.logs.templates import TEMPLATES_MAX, Templates, template_of
from detectors.roster import Roster
from detectors.verdict import Culprit, Verdict
from ingest.events import AttemptStarted, LogLine, Logs, RankPlace, Stream

RULES = RuleBook.shipped()


def roster_of(ranks: int = 4) -> Roster:
    places = tuple(RankPlace(rank=rank, local_rank=rank, node="n") for rank in range(ranks))
    started = AttemptStarted(job="j", attempt=1, rank=-1, node="n", sequence=0, at=0.0, world_size=ranks, places=places)
    roster = Roster(attempt=1, started_at=0.0)
    roster.observe(started, None)
    return roster


def logs(*texts: str, at: float = 1.0, rank: int = -1, node: str = "n", stream: Stream = "stderr") -> Logs:
    lines = tuple(LogLine(at=at, stream=stream, text=text) for text in texts)
    return Logs(job="j", attempt=1, rank=rank, node=node, sequence=0, at=at, lines=lines)


def test_ten_thousand_identical_lines_are_a_few_clues_and_no_more_memory() -> None:
    book, roster = LogBook(RULES), roster_of()
    text = "NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault"
    clues, size = [], 0
    for second in range(2_000):
        found, _ = book.read(logs(*[text] * 5, at=float(second)), None, roster)
        clues += found
        if second == 100:
            size = len(msgspec.json.encode(book.to_state()))
    assert len(clues) < 50
    assert len(msgspec.json.encode(book.to_state())) < size + 200
    assert clues[1].evidence[0].text.endswith("such line in 5 s)")
    assert book.hits["xid_app"] == 10_000


def test_a_storm_is_told_again_at_least_every_minute() -> None:
    storms = LogStorms()
    told = [at for at in range(1_000) if storms.tell("rule", "0/n", "", float(at), suffers=False) is not None]
    assert told[:4] == [0, 5, 15, 35]
    assert max(later - earlier for earlier, later in pairwise(told)) <= 60


def test_sufferers_are_told_of_64_ranks_and_causes_of_all() -> None:
    storms = LogStorms()
    for rule, suffers, expected in (("timeout", True, SPREAD_RANKS_MAX), ("oom", False, 1_000)):
        told = [rank for rank in range(1_000) if storms.tell(rule, f"{rank}/n", "", 1.0, suffers=suffers) is not None]
        assert len(told) == expected


def test_folds_are_bounded() -> None:
    storms = LogStorms()
    for rank in range(FOLDS_MAX + 500):
        storms.tell("rule", f"{rank}/n", "", 1.0, suffers=False)
    assert len(storms.folds) == FOLDS_MAX


def test_more_than_a_hundred_corrected_errors_of_one_device_in_an_hour_are_a_degraded_link() -> None:
    book, roster = LogBook(RULES), roster_of()
    text = "pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0"
    quiet = [book.read(logs(text, at=100.0 * index), None, roster)[1] for index in range(300)]  # 36 an hour
    assert {condition.fault_class for found in quiet for condition in found} == {"warning"}
    storm = [book.read(logs(text, at=40_000.0 + index), None, roster)[1] for index in range(120)]
    assert "link_degraded" in {condition.fault_class for found in storm for condition in found}
    other = "pcieport 0000:00:04.0: AER: Corrected error received: 0000:00:04.0"
    assert {condition.fault_class for condition in book.read(logs(other, at=40_130.0), None, roster)[1]} == {"warning"}


XID = "NVRM: Xid (PCI:0000:{device}:00): {code}, pid=1, MMU Fault"


def said(book: LogBook, text: str, at: float):
    (clue,), _ = book.read(logs(text, at=at), None, roster_of())
    return clue


def test_an_application_xid_that_one_gpu_has_again_is_the_gpus_fault() -> None:
    book = LogBook(RULES)
    assert said(book, XID.format(device="3b", code=31), 1.0).advice == "stop"
    book = book.successor()  # the attempt it broke is over, the job goes on
    again = said(book, XID.format(device="3b", code=13), 500.0)
    assert again.advice == "restart_exclude_node"
    assert again.culprits == (Culprit(node="n", confidence=0.8),)
    assert "for the 2. time within a day" in again.summary


def test_an_application_xid_that_several_gpus_have_is_the_programs() -> None:
    book = LogBook(RULES)
    said(book, XID.format(device="3b", code=31), 1.0)
    said(book, XID.format(device="5e", code=31), 2.0)
    assert said(book.successor(), XID.format(device="3b", code=31), 500.0).advice == "stop"


def test_a_day_later_an_xid_is_the_first_again() -> None:
    book = LogBook(RULES)
    said(book, XID.format(device="3b", code=31), 1.0)
    assert said(book.successor(), XID.format(device="3b", code=31), 100_000.0).advice == "stop"


TRACE = 'Traceback (most recent call last):\n  File "a.py", line 3, in f\n    g()\nValueError: no such shard'


def test_a_traceback_that_its_line_announces_as_handled_is_passed_over() -> None:
    for announced, expected in (("reading shard 7 failed, retrying in 2 s", 0), ("reading shard 7 failed", 1)):
        book = LogBook(RULES)
        clues, _ = book.read(logs(announced, TRACE, rank=0), None, roster_of())
        assert len(clues) == expected
        clues, _ = LogBook(RULES).read(logs(f"{announced}\n{TRACE}", rank=0), None, roster_of())
        assert len(clues) == expected


def test_what_was_announced_covers_one_traceback_of_its_stream_and_not_for_long() -> None:
    book = LogBook(RULES)
    book.read(logs("failed, retrying", TRACE, rank=0), None, roster_of())
    assert len(book.read(logs(TRACE, rank=0), None, roster_of())[0]) == 1
    book = LogBook(RULES)
    book.read(logs("failed, retrying", rank=0), None, roster_of())
    assert len(book.read(logs(TRACE, rank=1), None, roster_of())[0]) == 1
    assert len(book.read(logs(TRACE, rank=0, at=9.0), None, roster_of())[0]) == 1


def test_a_line_of_source_code_in_a_traceback_is_nobodys_word() -> None:
    text = (
        'Traceback (most recent call last):\n  File "a.py", line 3, in f\n'
        '    raise RuntimeError("CUDA error: out of memory") from None\nKeyError: 3'
    )
    assert [hit.rule.id for hit in RULES.match_record(text)] == ["pyexc"]


def test_a_rank_without_metrics_tells_its_step_by_its_progress_lines() -> None:
    book = LogBook(RULES)
    lines = ("iteration  41/ 100 | lm loss: 2.1 |", "OSError: [Errno 28] No space left on device")
    (clue,), _ = book.read(logs(*lines, rank=2), None, roster_of())
    assert clue.step == 41


def verdict(at: float, revision: int = 0) -> Verdict:
    return Verdict(
        verdict_id="v", revision=revision, job="j", attempt=1, fault_class="rank_lost", severity="critical",
        culprits=(Culprit(rank=1, node="n"),), onset_at=at, at=at, advice="restart_in_place", summary="",
    )  # fmt: skip


def habits(book: LogBook) -> None:
    for index in range(NOVEL_LINES_MIN * 2):
        book.read(logs(f"step {index} loss 2.{index}", at=float(index), rank=1), None, roster_of())


def test_what_a_culprit_said_for_the_first_time_stands_beside_its_verdict() -> None:
    book = LogBook(RULES)
    habits(book)
    odd = [f"{word} cache rebuilt in {index} s" for index, word in enumerate(("tokenizer", "kernel", "graph", "index"))]
    book.read(logs(*odd, "step 7 loss 1.1", at=150.0, rank=1), None, roster_of())
    book.read(logs("something else of rank 2", at=150.0, rank=2), None, roster_of())
    told = book.support(verdict(170.0))
    assert [item.text for item in told.evidence] == odd[:NOVEL_MAX]
    assert {(item.kind, item.rule, item.rank) for item in told.evidence} == {("log", "novel", 1)}
    assert book.support(verdict(500.0, revision=1)).evidence == told.evidence  # a later revision keeps them
    assert book.support(msgspec.structs.replace(verdict(500.0), verdict_id="w")).evidence == ()
    restored = LogBook.from_state(msgspec.json.decode(msgspec.json.encode(book.to_state())), RULES)
    assert restored.support(verdict(170.0)).evidence == told.evidence
    assert restored.to_state() == book.to_state()


def test_a_job_that_has_only_begun_has_nothing_new() -> None:
    book = LogBook(RULES)
    book.read(logs("a", "b", "c", at=150.0, rank=1), None, roster_of())
    assert book.support(verdict(170.0)).evidence == ()


def test_a_shape_is_what_stays_without_numbers_paths_and_addresses() -> None:
    one = "loaded /data/shard-17.bin at 0x7f12ab in 1.25 s"
    assert template_of(one) == template_of("loaded /data/x/shard-2041.bin at 0xdeadbeef in 310 s")
    assert template_of(one) != template_of("dropped /data/shard-17.bin at 0x7f12ab in 1.25 s")


def test_shapes_are_bounded_and_the_oldest_goes_first() -> None:
    shapes = Templates()
    words = ["".join(chr(97 + int(digit)) for digit in f"{index:05d}") for index in range(TEMPLATES_MAX + 1)]
    assert all(shapes.is_new(word) for word in words[:-1])
    assert not shapes.is_new(words[0])  # young again
    assert shapes.is_new(words[-1])
    assert len(shapes) == TEMPLATES_MAX
    assert not shapes.is_new(words[0])
    assert shapes.is_new(words[1])
