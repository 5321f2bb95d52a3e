"""What collectors read: kernel lines with their times, rotated files, exporters' numbers, others' health events."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from ingest.clock import ManualClock, SystemClock
from ingest.sources.exposition import NotExposition, parse_exposition, parse_query
from ingest.sources.health_events import NotHealth, from_scontrol, read_health
from ingest.sources.kernel_log import from_journal, from_kmsg, from_syslog
from ingest.sources.log_paths import labelled, slurm_place, torchrun_place
from pipelines.collect.health import EventFile
from pipelines.collect.kernel import Kmsg
from pipelines.collect.logs import LogFiles, Logs
from pipelines.collect.nvml import Nvml
from pipelines.collect.source import SeenLine, SourceFailed
from pipelines.collect.tail import Tail
from tests.embedded_chain import eventually


def texts(seen: object) -> list[str]:
    return [one.line.text for one in seen if isinstance(one, SeenLine)]  # type: ignore[attr-defined]


def test_a_kernel_record_has_the_time_of_its_boot_and_its_escapes_undone() -> None:
    line = from_kmsg(b"4,339,5140900,-;NVRM: Xid (PCI:0000:3b:00): 79, caf\\xe9\n SUBSYSTEM=pci\n", 1_000.0)
    assert line is not None
    assert (line.at, line.number, line.text) == (1_005.1409, 339, "NVRM: Xid (PCI:0000:3b:00): 79, café")
    assert from_kmsg(b"no record", 0.0) is None


def test_the_journal_and_syslog_files_tell_the_same_lines() -> None:
    told = from_journal(b'{"MESSAGE":[78,86,82,77],"__REALTIME_TIMESTAMP":"1790000000250000"}')
    assert told is not None
    assert (told.at, told.text) == (1_790_000_000.25, "NVRM")
    now = datetime(2026, 1, 1, 0, 5, tzinfo=UTC).timestamp()
    old = from_syslog("Dec 31 23:59:58 node7 kernel: [  12.5] NVRM: Xid", now)
    assert old is not None
    assert (old.host, old.text) == ("node7", "NVRM: Xid")
    assert old.at == datetime(2025, 12, 31, 23, 59, 58, tzinfo=UTC).timestamp()  # of the year before
    new = from_syslog("2026-01-01T00:04:00.5+00:00 node7 kernel: oops", now)
    assert new is not None
    assert (new.at, new.text) == (now - 59.5, "oops")
    assert from_syslog("Dec 31 23:59:58 node7 sshd[1]: hello", now) is None


def test_the_real_kernel_log_is_read_from_its_end() -> None:
    source = Kmsg(SystemClock())
    mark = f"transom-test {os.urandom(6).hex()}"
    with Path("/dev/kmsg").open("wb", buffering=0) as kernel:
        kernel.write(f"<5>{mark} one\n".encode())
    clock = SystemClock()
    found = eventually(lambda: [one for one in source.read(clock.now()) if mark in one.line.text], "the line")
    assert abs(found[0].line.at - clock.now()) < 60.0
    source.close()


def test_overwritten_kernel_records_are_counted_and_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "kmsg"
    path.touch()
    source = Kmsg(ManualClock(1_000.0), path)
    records: list[bytes | OSError] = [
        b"6,10,1000000,-;first\n",
        BrokenPipeError(),
        b"6,25,2000000,-;later\n",
        BlockingIOError(),
    ]

    def read(_file: int, _bytes: int) -> bytes:
        record = records.pop(0)
        if isinstance(record, OSError):
            raise record
        return record

    monkeypatch.setattr("pipelines.collect.kernel.os.read", read)
    said = texts(source.read(2_000.0))
    assert said == ["first", "transom: 14 records of the kernel were overwritten before this", "later"]
    assert source.counters()["overwritten"] == 14


def test_rotation_by_renaming_and_by_truncating_loses_and_doubles_nothing(tmp_path: Path) -> None:
    path = tmp_path / "train.log"
    path.write_text("one\ntwo\nhal")
    tail = Tail(path, None)
    read = lambda at: [line.text for line in tail.read(at, 100)]  # noqa: E731
    assert read(0.0) == ["one", "two"]
    with path.open("a") as stream:
        stream.write("f\nthree\n")
    path.rename(tmp_path / "train.log.1")
    path.write_text("four\n")
    assert read(1.0) == ["half", "three", "four"]
    position = tail.position
    tail.close()
    with path.open("a") as stream:
        stream.write("five\n")
    path.rename(tmp_path / "train.log.1")  # while nobody reads
    path.write_text("six\n")
    tail = Tail(path, msgspec.json.decode(msgspec.json.encode(position), type=type(position)))
    assert [line.text for line in tail.read(2.0, 100)] == ["five", "six"]
    os.truncate(path, 0)  # copied, and cut to nothing
    with path.open("a") as stream:
        stream.write("7\n")
    assert [line.text for line in tail.read(3.0, 100)] == ["7"]
    assert tail.counters() == {"rotated": 1, "truncated": 1}
    tail.close()


def test_a_restart_of_the_collector_reads_every_line_once_and_joins_what_was_open(tmp_path: Path) -> None:
    tree = tmp_path / "runs" / "theirs_abcd1234" / "attempt_1" / "0"
    tree.mkdir(parents=True)
    log, store = tree / "stderr.log", tmp_path / "positions.json"
    log.write_text('step 1\nTraceback (most recent call last):\n  File "a.py", line 1\n')
    first = Logs([LogFiles(str(tmp_path / "runs"))], store)
    seen = first.read(0.0)
    first.stored()
    first.close()
    assert texts(seen) == ["step 1"]
    (whose,) = {one.whose for one in seen if isinstance(one, SeenLine)}
    assert (whose.local_rank, whose.torchrun_attempt) == (0, 1)
    with log.open("a") as stream:
        stream.write("ValueError: bad\n")
    second = Logs([LogFiles(str(tmp_path / "runs"))], store)
    said = texts(second.read(1.0)) + texts(second.read(2.0))
    second.stored()
    assert said == ['Traceback (most recent call last):\n  File "a.py", line 1\nValueError: bad']
    third = Logs([LogFiles(str(tmp_path / "runs"))], store)
    assert texts(third.read(3.0)) + texts(third.read(4.0)) == []
    assert store.stat().st_mode & 0o077 == 0
    second.close()
    third.close()


def test_paths_tell_whose_output_it_is() -> None:
    assert torchrun_place("/l/run7_ab12cd34/attempt_2/3/stdout.log") == ("stdout", "run7", 2, None, 3, "")
    place = slurm_place("/l/%x-%j/%N-%t.err", "/l/llama-77/gpu-3-12.err")
    assert place is not None
    assert (place.run, place.rank, place.node, place.stream) == ("77", 12, "gpu-3", "stderr")
    assert slurm_place("/l/%j.out", "/l/x.out") is None
    assert labelled(" 3: loss: 1.5") == (3, "loss: 1.5")
    assert labelled("loss: 1.5") == (None, "loss: 1.5")


def test_exporters_names_and_units_become_ours() -> None:
    text = (
        "# TYPE DCGM_FI_DEV_GPU_UTIL gauge\n"
        'DCGM_FI_DEV_GPU_UTIL{gpu="1",UUID="GPU-5f",pci_bus_id="00000000:3B:00.0",Hostname="n1"} 97\n'
        'DCGM_FI_DEV_FB_USED{gpu="1",pci_bus_id="00000000:3B:00.0"} 2\n'
        'DCGM_FI_DEV_SM_CLOCK{gpu="1"} 1980\nDCGM_FI_DEV_POWER_USAGE{gpu="1"} NaN\nnode_load1 0.5\n'
        'node_filesystem_avail_bytes{mountpoint="/boot"} 5\nnode_filesystem_avail_bytes{mountpoint="/"} 7\n'
    )
    found = {(one.device, one.name): one.value for one in parse_exposition(text)}
    assert found == {
        ("gpu:1", "hw.gpu.utilization"): 0.97, ("gpu:1", "hw.gpu.memory.usage"): 2_097_152.0,
        ("gpu:1", "hw.gpu.clock.sm"): 1.98e9, ("host", "system.cpu.load_1m"): 0.5, ("host", "system.disk.free"): 7.0,
    }  # fmt: skip
    with pytest.raises(NotExposition, match="not Prometheus"):
        parse_exposition("<html>no</html>{")
    result = b'[{"metric":{"__name__":"node_load1"},"value":[1,"3"]}]'
    answer = b'{"status":"success","data":{"resultType":"vector","result":' + result + b"}}"
    assert [one.value for one in parse_query(answer)] == [3.0]
    with pytest.raises(NotExposition, match="refuses the query: bad"):
        parse_query(b'{"status":"error","error":"bad","data":{}}')


def test_events_of_others_are_lines_that_the_rules_know() -> None:
    event = (
        b'{"agent":"syslog-health-monitor","checkName":"SysLogsXIDError","isFatal":true,"isHealthy":false,"message":"gone",'
        b'"errorCode":["79"],"entitiesImpacted":[{"entityType":"PCI","entityValue":"0000:3b:00"}],"nodeName":"n1",'
        b'"generatedTimestamp":"2026-01-01T00:00:00Z"}'
    )
    (line,) = read_health(event, 2e9)
    assert (line.host, line.text) == ("n1", "NVRM: Xid (PCI:0000:3b:00): 79, SysLogsXIDError gone")
    states = b'[{"component":"disk","states":[{"health":"Unhealthy","reason":"full"},{"health":"Healthy"}]}]'
    assert [one.text for one in read_health(states, 5.0)] == ["gpud: disk unhealthy: full"]
    with pytest.raises(NotHealth):
        read_health(b'{"a":1}', 0.0)
    shown = "NodeName=n3 Arch=x86_64 State=IDLE+DRAIN ThreadsPerCore=1 Reason=bad NIC [root@2026-01-01T00:00:00]"
    drained = from_scontrol(shown, 9.0)
    assert drained is not None
    assert drained.text == "slurm: node n3 is IDLE+DRAIN: bad NIC (by root)"
    assert from_scontrol("NodeName=n3 State=MIXED Reason=old", 9.0) is None


def test_a_file_of_events_is_followed_from_its_end_and_what_is_none_is_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"old":1}\n')
    source = EventFile(path, 1.0)
    assert texts(source.read(1.0)) == []
    with path.open("a") as stream:
        stream.write('not json\n[{"component":"nvlink","states":[{"health":"Degraded","reason":"down"}]}]\n')
    assert texts(source.read(2.0)) == ["gpud: nvlink degraded: down"]
    assert source.counters() == {"unreadable": 1}
    source.close()


def test_a_driver_that_hangs_is_a_finding_and_no_hang_of_ours() -> None:
    clock = ManualClock(100.0)
    silent = [sys.executable, "-c", "import time; time.sleep(600)"]
    source = Nvml(clock, hang_seconds=5.0, command=silent)
    assert texts(source.read(clock.now())) == []
    clock.advance(6.0)
    assert texts(source.read(clock.now())) == [
        "transom: NVML has not answered for 6 s: the driver of this node's GPUs hangs"
    ]
    assert texts(source.read(clock.now())) == []  # told once
    source.close()


def test_a_machine_without_a_gpu_says_so_in_a_sentence() -> None:
    source = Nvml(SystemClock(), 0.2)
    with pytest.raises(SourceFailed, match=r"collect\.nvml"):
        eventually(lambda: source.read(0.0), "NVML's own words")
    source.close()
