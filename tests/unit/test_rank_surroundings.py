"""What a rank learns about its thread and its GPU from /proc, and the table that notebooks get."""

from __future__ import annotations

import math
import threading
from pathlib import Path

import pytest

import transom
from ingest.clock import ManualClock, SystemClock
from ingest.devices import Gpu, gpu_of_rank, nvidia_gpus
from ingest.events import Metrics, NodeHeartbeat, split_non_finite
from ingest.metrics_frame import metrics_frame
from ingest.run_queue import ThreadMeter

GPUS = (Gpu("GPU-aaaa-1", "0000:3b:00.0"), Gpu("GPU-bbbb-2", "0000:86:00.0"))


def test_a_thread_meter_reads_the_thread_that_made_it_from_any_thread() -> None:
    meter = ThreadMeter(SystemClock())
    before = meter.read()
    sum(number * number for number in range(300_000))
    readings = []
    other = threading.Thread(target=lambda: readings.append(meter.read()))
    other.start()
    other.join()
    assert readings[0].cpu > before.cpu
    assert readings[0].wall > before.wall
    meter.close()
    meter.close()


def test_the_run_queue_delay_is_the_second_field_in_nanoseconds(tmp_path: Path) -> None:
    schedstat = tmp_path / "schedstat"
    schedstat.write_text("111 2500000000 7\n")
    meter = ThreadMeter(ManualClock(5.0), schedstat_path=str(schedstat))
    assert meter.read().run_queue_delay == 2.5
    assert meter.read().wall == 5.0
    meter.close()


@pytest.mark.parametrize("text", ["", "garbage\n", "1 x 3\n", None])
def test_a_kernel_without_schedstat_has_no_delay(tmp_path: Path, text: str | None) -> None:
    schedstat = tmp_path / "schedstat"
    if text is not None:
        schedstat.write_text(text)
    open_before = len(list(Path("/proc/self/fd").iterdir()))
    meter = ThreadMeter(SystemClock(), schedstat_path=str(schedstat))
    assert meter.read().run_queue_delay is None
    assert len(list(Path("/proc/self/fd").iterdir())) == open_before


def test_gpus_are_read_from_the_drivers_folder_in_pci_order(tmp_path: Path) -> None:
    for gpu in reversed(GPUS):
        (tmp_path / gpu.pci_address).mkdir()
        (tmp_path / gpu.pci_address / "information").write_text(
            f"Model: \t\t NVIDIA H100\nIRQ:   \t\t 17\nGPU UUID: \t {gpu.uuid}\nBus Type: \t PCIe\n"
        )
    assert nvidia_gpus(str(tmp_path)) == GPUS
    (tmp_path / GPUS[0].pci_address / "information").write_text("GPU UUID: \t ????????\n")
    assert nvidia_gpus(str(tmp_path))[0] == Gpu(None, GPUS[0].pci_address)
    assert nvidia_gpus(str(tmp_path / "none")) == ()


@pytest.mark.parametrize(
    ("local_rank", "visible", "gpus", "expected"),
    [
        (0, None, GPUS[:1], GPUS[0]),
        (0, "0", GPUS[:1], GPUS[0]),
        (1, "GPU-aaaa-1,GPU-bbbb-2", GPUS, GPUS[1]),
        (1, "GPU-bbbb", GPUS, GPUS[1]),
        (0, None, GPUS, None),
        (1, "1,0", GPUS, None),
        (0, "MIG-1,GPU-aaaa-1", GPUS, None),
        (0, "GPU-", GPUS, None),
        (0, "", GPUS, None),
        (0, None, (), None),
    ],
)
def test_a_rank_names_its_gpu_only_where_that_is_certain(
    local_rank: int, visible: str | None, gpus: tuple[Gpu, ...], expected: Gpu | None
) -> None:
    assert gpu_of_rank(local_rank, visible, gpus) == expected


def message(rank: int, **columns: list[float | None]) -> Metrics:
    finite, rest = split_non_finite(columns)
    return Metrics(
        job="job", attempt=1, rank=rank, node="n", sequence=0, at=9.0, phase="train", step=3, steps=(1, 2),
        ended_at=(7.0, 8.0), columns=finite, non_finite=rest,
    )  # fmt: skip


def test_metrics_become_one_row_per_rank_and_step() -> None:
    heartbeat = NodeHeartbeat(job="job", attempt=1, rank=-1, node="n", sequence=0, at=9.0)
    table = transom.frame([message(0, loss=[1.0, math.inf]), heartbeat, message(1, loss=[None, 2.0])])
    assert list(table["rank"]) == [0, 0, 1, 1]
    assert list(table["step"]) == [1, 2, 1, 2]
    assert list(table["loss"][:2]) == [1.0, math.inf]
    assert math.isnan(table["loss"][2])


def test_no_messages_are_an_empty_table_with_its_columns() -> None:
    assert list(metrics_frame([]).columns) == ["job", "attempt", "rank", "node", "step", "ended_at"]
