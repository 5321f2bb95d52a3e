"""The book of log rules: every rule on its own lines, real failures, and lines that only look bad."""

# ruff: noqa: E501 - log lines are as long as they are

from __future__ import annotations

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from detectors.logs.book import LogBook
from detectors.logs.line_prefixes import LINE_CHARACTERS_MAX
from detectors.logs.rule_book import RuleBook, RuleError, strip_prefixes
from detectors.roster import Roster
from ingest.events import LogLine, Logs
from tests.log_lines import BENIGN as CORPUS
from tests.log_lines import REAL as FURTHER

RULES = RuleBook.shipped()
NOISE = ("noise", "advice")


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.id)
def test_each_rule_is_the_first_to_match_its_own_lines_and_leaves_its_near_misses_alone(rule) -> None:
    for line in rule.must_match:
        hit = RULES.match_line(line)
        assert hit is not None
        assert hit.rule.id == rule.id
    for line in rule.must_not_match:
        assert not re.search(rule.pattern, strip_prefixes(line))


# Shapes of public failure reports, made anonymous: (records, class of the first root, or of what else there is)
REAL = {
    "watchdog, all ranks alike": (
        ["[rank0]:[E321 02:07:08.40 ProcessGroupNCCL.cpp:607] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, Timeout(ms)=600000) ran for 600060 milliseconds before timing out."],
        "cascade", "collective_timeout",
    ),
    "out of memory first, time-outs later": (
        [
            "[rank2]: torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 336.00 MiB. GPU  has a total capacity of 79.15 GiB",
            "node01:15325:16199 [2] NCCL INFO [Service thread] Connection closed by localRank 2",
            "[rank5]:[E ProcessGroupNCCL.cpp:563] [Rank 5] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=15734)",
        ],
        "root", "oom",
    ),
    "out of memory, new spelling": (
        ["[rank11]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.35 GiB.", "W1026 03:51:31.222000 2521679 api.py:908] Sending process 2521733 closing signal SIGTERM"],
        "root", "oom",
    ),
    "kernel kills for memory": (
        ["[2059991.491436] oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),global_oom,task=python3,pid=25315,uid=0", "[2059991.491542] Out of memory: Killed process 25315 (python3) total-vm:53312244kB"],
        "confirm", "host_oom",
    ),
    "fatal AER, then the GPU is gone": (
        ["[74889.542031] pcieport 0000:00:02.0: AER: Uncorrected (Fatal) error received: id=0010", "[74889.644138] NVRM: Xid (PCI:0000:02:00): 79, GPU has fallen off the bus."],
        "root", "gpu_lost",
    ),
    "NVLink, and what follows it": (
        ["kernel: NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6)", "kernel: NVRM: Xid (PCI:0000:ed:00): 45, pid=1818992, name=python3, Ch 0000000c caused by previous Xid 145"],
        "root", "nvlink_error",
    ),
    "NVLink, not fatal": (["NVRM: Xid (PCI:0000:c5:00): 145, RLW_SRC_TRACK Nonfatal XC1 i0 Link 17 (0x04084507)"], "warning", "warning"),
    "ECC": (
        ["[rank1]: RuntimeError: CUDA error: uncorrectable ECC error encountered", "CUDA kernel errors might be asynchronously reported at some other API call", "For debugging consider passing CUDA_LAUNCH_BLOCKING=1."],
        "root", "gpu_ecc",
    ),
    "illegal access": (
        ["[rank0]:[E504 22:44:08.38 ProcessGroupNCCL.cpp:1896] [Rank 0] Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was encountered", "Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."],
        "root", "illegal_memory_access",
    ),
    "port error": (["node3:118:320 [2] NCCL WARN NET/IB : Got async event : port error"], "root", "network_error"),
    "reset by the peer": (["node7 [5] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to send to 10.0.0.151<52905> failed : Connection reset by peer", "node7 [5] NCCL INFO misc/socket.cc:64 -> 6"], "cascade", "network_error"),
    "data loader killed": (["RuntimeError: DataLoader worker (pid 12847) is killed by signal: Killed. "], "root", "rank_lost"),
    "teardown, ending nothing": (["Exception ignored in: <function _MultiProcessingDataLoaderIter.__del__ at 0x7f00>", "RuntimeError: DataLoader worker (pid 4141) is killed by signal: Killed. ", "[rank0] step 3/3 Saved model"], "", ""),
    "disk full": (["tee: train_log1129.txt: No space left on device", "RuntimeError: [enforce fail at inline_container.cc:471] . PytorchStreamWriter failed writing file data/807: file write failed"], "root", "disk_full"),
    "stale mount": (["OSError: [Errno 116] Stale file handle: '/mnt/nfs/ckpt/optimizer.pt'"], "root", "storage_error"),
    "NaN in a gradient": (["AssertionError: Rank 11: found NaN in local grad norm in backward pass before data-parallel communication collective. Device: 3"], "root", "nan"),
    "time limit": (["slurmstepd: error: *** STEP 494583.0 ON node2 CANCELLED AT 2024-04-20T09:09:37 DUE TO TIME LIMIT ***"], "root", "preempted"),
    "rendezvous lost": (["WARNING:torch.distributed.elastic.rendezvous.dynamic_rendezvous:The node 'a_3140_0' has failed to shutdown the rendezvous '30450' due to an error of type RendezvousConnectionError.", "RuntimeError: Connection reset by peer"], "cascade", "network_error"),
    "unknown CUDA error": (["[default3]:terminate called after throwing an instance of 'c10::CUDAError'", "[default3]:  what():  CUDA error: unknown error"], "root", "cuda_error"),
    "corrected AER": (["[  +0.000316] pcieport 0000:00:03.0: AER: Corrected error received: 0000:00:03.0", "[  +0.000005] pcieport 0000:00:03.0: PCIe Bus Error: severity=Corrected, type=Data Link Layer, (Transmitter ID)"], "warning", "warning"),
    "broken pipe": (["node22:183006:183220 [1] misc/socket.cc:518 NCCL WARN Net : Call to recv from 10.0.0.247<58355> failed : Broken pipe", "node22:183006:183220 [1] proxy.cc:1119 NCCL WARN [Proxy Service 9] Failed to execute operation Connect from rank 9, retcode 6"], "cascade", "network_error"),
    "gloo's victims": (["RuntimeError: [/t/gloo/gloo/transport/tcp/pair.cc:561] Connection closed by peer [127.0.0.1]:2999. This is typically caused by a remote worker crashing"], "cascade", "network_error"),
}  # fmt: skip

BENIGN = [
    "[default7]: iteration    31214/  115311 | consumed samples:     47768496 | lm loss: 2.198845E+00 | grad norm: 0.242 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0 | samples per second: 19.238 | TFLOPs: 147.29 |",
    "node0:1:2 [0] NCCL INFO Connected all rings",
    "saving checkpoint at iteration 4000 to /ckpt in torch_dist format",
    "WARNING: checkpoint sharding mismatch tolerated, resharding from tp=4 to tp=8",
    "loss scale: 65536.0 | nan count 0 | inf count 0",
    "timeout=1800s configured for process group; NCCL watchdog enabled",
    "nfs: server 10.0.0.16 OK",
    "step 143 loss 2.3101 grad norm 0.91",
    "{'loss': 2.31, 'grad_norm': 0.9, 'epoch': 0.4}",
    "process group backend: gloo, world size 4",
    "this run tolerates a ValueError in a sample and goes on",
    "I1126 10:00:00 information about infinity norms: nanobatch 4",
    "Killed 0 stale jobs; no CUDA errors so far",
]  # fmt: skip


def read(records: list[str], rank: int = 0):
    book, roster = LogBook(RULES), Roster(attempt=1, started_at=0.0)
    clues, warnings = [], []
    for number, text in enumerate(records):
        line = LogLine(at=float(number), stream="stderr", text=text)
        message = Logs(job="j", attempt=1, rank=rank, node="n", sequence=number, at=float(number), lines=(line,))
        roster.observe(message, None)
        found, warned = book.read(message, None, roster)
        clues += found
        warnings += warned
    return clues, warnings


@pytest.mark.parametrize("name", REAL)
def test_real_failures_get_their_class_and_role(name: str) -> None:
    records, role, fault_class = REAL[name]
    clues, warnings = read(records)
    if role in ("", "warning"):
        assert not clues
        assert bool(warnings) == (role == "warning")
        return
    best = next((clue for clue in clues if clue.role == "root"), clues[0])
    assert (best.role, best.fault_class) == (role, fault_class)


@pytest.mark.parametrize("line", BENIGN)
def test_lines_that_only_look_bad_fire_nothing(line: str) -> None:
    clues, warnings = read([line])
    assert not clues
    assert not warnings


@pytest.mark.parametrize(
    "line",
    [
        "iteration    31214/  115311 | lm loss: 2.1E+00 | number of nan iterations:   2 |",
        "{'loss': nan, 'grad_norm': 0.9, 'epoch': 0.4}",
        "step 12 loss nan",
    ],
)
def test_a_progress_line_tells_of_nan_by_its_numbers_only(line: str) -> None:
    hit = RULES.match_line(line)
    assert hit is not None
    assert hit.rule.id == "nan"


def test_of_hundreds_of_harmless_lines_none_fires_anything() -> None:
    hits = [(line, RULES.match_line(line)) for line in CORPUS]
    assert [(line, hit.rule.id) for line, hit in hits if hit is not None and hit.rule.role not in NOISE] == []


def test_lines_of_other_reports_go_to_their_rule() -> None:
    hits = [(line, rule, RULES.match_line(line)) for line, rule in FURTHER]
    assert [(line, rule, hit) for line, rule, hit in hits if hit is None or hit.rule.id != rule] == []


@pytest.mark.parametrize(
    "line",
    [
        "RuntimeError: Connection reset by peer",
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB",
        "OSError: [Errno 5] Input/output error",
    ],
)
def test_who_goes_on_is_not_believed_to_have_failed_and_who_gives_up_is(line: str) -> None:
    assert RULES.match_line(line) is not None
    for going_on in ("retrying in 5 s", "will retry", "attempt 2/5", "skipping this batch", "falling back to the CPU"):
        assert RULES.match_line(f"{line}, {going_on}") is None
    for given_up in ("retrying is of no use, giving up", "retries exhausted after attempt 5/5"):
        assert RULES.match_line(f"{line}, {given_up}") is not None


def test_a_kernels_word_counts_whatever_it_says_of_trying_again() -> None:
    assert RULES.match_line("nfs: server 10.0.0.16 not responding, retrying") is not None


def test_what_a_logger_calls_information_is_no_failure_but_a_loss_is_told_as_it_comes() -> None:
    assert RULES.match_line("INFO - OSError: [Errno 5] Input/output error") is None
    assert RULES.match_line("ERROR - OSError: [Errno 5] Input/output error") is not None
    assert RULES.match_line("INFO - Loss is nan, stopping training") is not None


def test_a_record_of_the_driver_names_its_gpu_in_the_first_line() -> None:
    record = (
        "NVRM: The NVIDIA GPU 0000:26:00.0\nNVRM: (PCI ID: 10de:2324) installed in this system has\n"
        "NVRM: fallen off the bus and is not responding to commands."
    )
    assert [(hit.rule.id, hit.pci) for hit in RULES.match_record(record)] == [("xid_off_bus", "0000:26:00")]


def test_a_line_names_the_peer_it_lost() -> None:
    hit = RULES.match_line("node7 [5] NCCL WARN Call to send to 10.0.0.151<52905> failed : Connection reset by peer")
    assert hit is not None
    assert hit.peer == "10.0.0.151"


XID = {  # NVIDIA's public catalogue in five words each
    "gpu_lost": [46, 62, 79, 109, 110, 119, 120, 143, 156, 158],
    "gpu_ecc": [48, 64, 94, 95, 140, 171, 172],
    "nvlink_error": [74, 136, 155],
    "cuda_error": [8, 11, 13, 25, 31, 32, 39, 40, 41, 60, 68, 69, 70, 71, 72, 75, 76, 77, 80, 82, 83, 84, 85, 86, 88, 89, 96, 97, 98, 99, 100, 101, 102, 103, 104, 105, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135, 139],
    "warning": [37, 38, 43, 44, 45, 54, 63, 66, 67, 78, 92, 93, 106, 107, 121, 137, 141, 152, 153, 157, 159, 160, 161, 162, 163, 164, 166, 168, 170],
}  # fmt: skip


@pytest.mark.parametrize(("fault_class", "code"), [(name, code) for name, codes in XID.items() for code in codes])
def test_every_xid_code_has_its_class(fault_class: str, code: int) -> None:
    hit = RULES.match_line(f"NVRM: Xid (PCI:0000:3b:00): {code}, pid=4141, name=python3")
    assert hit is not None
    assert hit.rule.fault_class == fault_class
    assert hit.pci == "0000:3b:00"
    assert hit.pid == 4141


@pytest.mark.parametrize("code", range(144, 151))
def test_xids_of_nvlink5_depend_on_the_word_fatal(code: int) -> None:
    fatal = RULES.match_line(f"NVRM: Xid (PCI:0000:3b:00): {code}, X Fatal XC0 i0 Link 08 (0x0)")
    mild = RULES.match_line(f"NVRM: Xid (PCI:0000:3b:00): {code}, X Nonfatal XC0 i0 Link 08 (0x0)")
    assert fatal is not None
    assert fatal.rule.fault_class == "nvlink_error"
    assert mild is not None
    assert mild.rule.fault_class == "warning"


def test_a_flood_of_one_rule_counts_once_in_five_seconds() -> None:
    line = LogLine(at=1.0, stream="kernel", text="NVRM: Xid (PCI:0000:3b:00): 31, pid=1, MMU Fault")
    message = Logs(job="j", attempt=1, rank=-1, node="n", sequence=0, at=1.0, lines=(line,) * 500)
    clues, _ = LogBook(RULES).read(message, None, Roster(attempt=1, started_at=0.0))
    assert len(clues) == 1


def test_a_rule_file_that_is_wrong_says_which_rule_and_why(tmp_path: Path) -> None:
    rule = (
        '[[rule]]\nid = "x"\nclass = "nan"\nrole = "root"\nadvice = "none"\nseverity = "info"\nsource = "s"\n'
        'pattern = "abc"\ngate = ["abc"]\nmust_match = ["{match}"]\nmust_not_match = ["def"]\n{more}'
    )
    (tmp_path / "a.toml").write_text(rule.format(match="xyz", more=""))
    with pytest.raises(RuleError, match="rule x does not match its own line"):
        RuleBook.load(tmp_path)
    (tmp_path / "a.toml").write_text(rule.format(match="abc", more="colour = 1\n"))
    with pytest.raises(RuleError, match=r"a\.toml .*colour"):
        RuleBook.load(tmp_path)


def wildcards_in_a_row(tree: Any) -> int:
    """How many `.*` without a bound one way through a parsed pattern has: two make its time grow with the cube."""
    most = 0
    for code, argument in tree:
        name = str(code)
        if name == "BRANCH":
            most += max(wildcards_in_a_row(branch) for branch in argument[1])
        elif name in ("SUBPATTERN", "ATOMIC_GROUP"):
            most += wildcards_in_a_row(argument[-1] if name == "SUBPATTERN" else argument)
        elif name in ("MAX_REPEAT", "MIN_REPEAT", "POSSESSIVE_REPEAT"):
            _, high, inner = argument
            anything = high > LINE_CHARACTERS_MAX and [str(part) for part, _ in inner] == ["ANY"]
            most += 1 if anything else wildcards_in_a_row(inner)
    return most


@pytest.mark.parametrize("rule", RULES.rules, ids=lambda rule: rule.id)
def test_no_pattern_is_slow_on_a_line_made_to_be(rule) -> None:
    parser: Any = importlib.import_module("re._parser")
    assert wildcards_in_a_row(parser.parse(rule.pattern)) <= 1


def test_lines_of_any_length_are_read() -> None:
    for rule in RULES.rules:
        for line in rule.must_match:
            RULES.match_line(line * (1 + 100_000 // len(line)))
            RULES.match_line("x" * 100_000 + line)
