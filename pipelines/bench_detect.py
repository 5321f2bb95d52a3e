"""`transom bench detect`: rank messages a second from bytes to score, the cost of a step and the memory as ranks grow.

The messages are made up (steady timings with 2 % noise), their form is a real rank's: one step and twelve columns each.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import msgspec
import numpy as np

from detectors.config import DetectorConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook
from detectors.steps import TIMINGS
from ingest.bus import Record
from ingest.codec import Codec
from ingest.events import AttemptStarted, Message, Metrics, NodeHeartbeat, RankPlace
from pipelines.bench_detect_logs import measure_log_lines
from pipelines.detection import Detection
from pipelines.figures import Figure
from pipelines.own_process import collect_garbage_seldom

COLUMNS = (*TIMINGS, "train.gradient.local_norm", "train.loss")
RANKS_PER_NODE = 8
STARTED_AT = 1_000.0
STEP_SECONDS = 1.0
BATCH = 2_000  # records between two conclusions, as the service polls
MESSAGE_RANKS, MESSAGE_STEPS = 1_024, 70
SCORED_STEPS = 120  # until every base is learned and the models are fitted
MEMORY_RANKS, MEMORY_STEPS = 16_384, 40
SIZES = {"1k": 1_024, "4k": 4_096, "16k": 16_384}


class _Memory(msgspec.Struct, frozen=True):
    rss_bytes: int


def measurements() -> list[tuple[str, Callable[[], list[Figure]]]]:
    """What `transom bench detect` does, one after another: a title and the measuring function."""
    steps: list[tuple[str, Callable[[], list[Figure]]]] = [
        (f"a step of {ranks:,} ranks", partial(_one, measure_step, label, ranks)) for label, ranks in SIZES.items()
    ]
    return [
        ("rank messages", partial(_one, measure_rank_messages)),
        *steps,
        (f"memory at {MEMORY_RANKS:,} ranks", partial(_one, measure_memory)),
        ("log lines", measure_log_lines),
    ]


def _one(measure: Callable[..., Figure], *arguments: object) -> list[Figure]:
    return [measure(*arguments)]


def made_up_steps(ranks: int, steps: int, seed: int = 0) -> Iterator[list[Message]]:
    """The messages of one step after another; the first list also starts the attempt."""
    dice = np.random.default_rng(seed)
    nodes = [f"node{index}" for index in range(-(-ranks // RANKS_PER_NODE))]
    places = tuple(
        RankPlace(rank=rank, local_rank=rank % RANKS_PER_NODE, node=nodes[rank // RANKS_PER_NODE])
        for rank in range(ranks)
    )
    begun: list[Message] = [
        AttemptStarted(
            job="bench", attempt=1, rank=-1, node=nodes[0], sequence=0, at=STARTED_AT, world_size=ranks, places=places
        )
    ]
    for step in range(steps):
        ended_at = STARTED_AT + (step + 1) * STEP_SECONDS
        samples = np.round(dice.normal(0.5, 0.01, (ranks, len(COLUMNS))), 6).tolist()
        told: list[Message] = [
            Metrics(
                job="bench", attempt=1, rank=rank, node=places[rank].node, sequence=step, at=ended_at, phase="train",
                step=step, steps=(step,), ended_at=(ended_at,),
                columns={name: (value,) for name, value in zip(COLUMNS, samples[rank], strict=True)},
            )
            for rank in range(ranks)
        ]  # fmt: skip
        beats = [
            NodeHeartbeat(
                job="bench", attempt=1, rank=-1, node=node, sequence=step, at=ended_at,
                ranks_alive=tuple(range(index * RANKS_PER_NODE, (index + 1) * RANKS_PER_NODE)),
            )
            for index, node in enumerate(nodes)
        ]  # fmt: skip
        yield [*begun, *told, *beats]
        begun = []


def measure_rank_messages(ranks: int = MESSAGE_RANKS, steps: int = MESSAGE_STEPS) -> Figure:
    """Bytes to score on one core: decode, merge, matrix, channels; the steps in which models are fitted included."""
    records = list(encoded_records(made_up_steps(ranks, steps)))
    detection = Detection(DetectorConfig(), RuleBook.shipped())
    collect_garbage_seldom()
    began = time.process_time()
    _run(detection, records)
    seconds = time.process_time() - began
    return Figure("detect.rank_messages_per_second", round(ranks * steps / seconds), "messages/s", n=ranks * steps)


def measure_step(label: str, ranks: int, steps: int = SCORED_STEPS) -> Figure:
    """Milliseconds that the scoring of one whole step takes, once its messages are in: the median of the last half."""
    detector = JobDetector("bench")
    taken: list[float] = []
    for messages in made_up_steps(ranks, steps):
        for message in messages:
            detector.observe(message)
        until = messages[-1].at
        began = time.process_time()
        detector.advance(until)
        taken.append(1e3 * (time.process_time() - began))
    half = taken[len(taken) // 2 :]
    return Figure(f"detect.step_ms_{label}", round(statistics.median(half), 3), "ms", n=len(half))


def measure_memory(ranks: int = MEMORY_RANKS, steps: int = MEMORY_STEPS) -> Figure:
    """The largest resident size of a process that has detected over so many ranks."""
    command = [sys.executable, "-P", "-m", "pipelines.bench_detect", str(ranks), str(steps)]
    told = subprocess.run(command, capture_output=True, check=True).stdout
    rss_bytes = msgspec.json.decode(told, type=_Memory).rss_bytes
    return Figure("detect.rss_bytes_16k", rss_bytes, "bytes", n=ranks * steps)


def encoded_records(told: Iterable[list[Message]]) -> Iterator[Record]:
    """These messages as they lie on a bus of one partition, each taken 50 ms after it was stamped."""
    codec = Codec()
    offsets = {"metrics": 0, "events": 0}
    for messages in told:
        for message in messages:
            encoded = codec.encode(message)
            offset = offsets[encoded.topic]
            offsets[encoded.topic] = offset + 1
            yield Record(encoded.topic, 0, offset, encoded.key, encoded.headers, encoded.value, message.at + 0.05)


def _run(detection: Detection, records: list[Record]) -> None:
    now = STARTED_AT
    for begin in range(0, len(records), BATCH):
        for record in records[begin : begin + BATCH]:
            detection.feed(record)
            now = record.appended_at
        detection.conclude(now)


def _largest_resident(ranks: int, steps: int) -> _Memory:
    detection = Detection(DetectorConfig(), RuleBook.shipped())
    now = STARTED_AT
    for count, record in enumerate(encoded_records(made_up_steps(ranks, steps))):
        detection.feed(record)
        now = record.appended_at
        if count % BATCH == 0:
            detection.conclude(now)
    detection.conclude(now)
    return _Memory(rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(_largest_resident(int(sys.argv[1]), int(sys.argv[2]))))
