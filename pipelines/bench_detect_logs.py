"""How many log lines a second one core reads through the rules: short ones of all kinds, long progress lines."""

from __future__ import annotations

import time
from collections.abc import Sequence

from detectors.logs.rule_book import RuleBook
from pipelines.figures import Figure

ROUNDS = 5
SECONDS_MIN = 0.4  # of processor time, for one round: other processes on the core are not our cost

# What a healthy job prints most, and one line in twenty that a rule matches.
SHORT = (
    "node0:15325:16199 [2] NCCL INFO Channel 03/0 : 2[2] -> 3[3] via P2P/CUMEM",
    "node0:15325:16199 [2] NCCL INFO Connected all rings",
    "saving checkpoint at iteration 4000 to /ckpt in torch_dist format",
    "  successfully saved checkpoint from iteration    4000 to /ckpt [ t 1/8, p 1/1 ]",
    "[rank3]: compiled graph in 12.3 s, 812 nodes",
    "2024-05-01 10:00:00,123 - root - INFO - allocated 12.3 GiB of 79.1 GiB on device 3",
    "step 143 loss 2.3101 grad norm 0.91",
    "{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.4}",
    "  5%|▌         | 1021/20000 [45:39<51:20:53,  1.87s/it]",
    "INFO:torch.distributed.elastic.agent.server.api:[default] Starting worker group",
    "Using FlashAttention 2 for attention layers",
    "loading shard 17 of 512 from /data/c4",
    "[2024-01-01 10:00:00,123] [INFO] [logging.py:96] [Rank 0] step=10, skipped=0, lr=[1e-05], mom=[(0.9, 0.99)]",
    "learning rate decayed to 1.2e-05 after warm-up",
    "W0219 12:09:28.313000 4141 torch/distributed/run.py:757] Setting OMP_NUM_THREADS environment variable to 1",
    "WARNING: the tokenizer has no padding token, using the end of sequence",
    "eval: 512 samples, exact match 0.71, 0 failures",
    "(WorkerDict pid=32167) [2025-12-17 14:10:28] timer.py:32 - Timer actor_train end (elapsed: 81.3s)",
    "Apr 12 00:54:42 node7 systemd[1]: Started Session 4 of user root.",
    "n7:77:99 [5] misc/socket.cc:46 NCCL WARN socketProgressOpt: Call to send to 10.0.0.1<5290> failed : Broken pipe",
)
PROGRESS = (
    "[default7]: iteration    31214/  115311 | consumed samples:     47768496"
    " | elapsed time per iteration (ms): 105210.4 | learning rate: 5.412E-05"
    " | global batch size:  2048 | lm loss: 2.198845E+00 | loss scale: 1.0"
    " | grad norm: 0.242 | num zeros: 0.0 | number of skipped iterations:   0 | number of nan iterations:   0"
    " | samples per second: 19.238 | TFLOPs: 147.29 |",
)


def measure_log_lines() -> list[Figure]:
    """`detect.log_lines_per_second` and `detect.progress_lines_per_second`: the best of five rounds on this core."""
    book = RuleBook.shipped()
    return [
        Figure("detect.log_lines_per_second", *_rate(book, SHORT)),
        Figure("detect.progress_lines_per_second", *_rate(book, PROGRESS)),
    ]


def _rate(book: RuleBook, lines: Sequence[str]) -> tuple[float, str, int]:
    """(lines a second, unit, lines read)."""
    batch = list(lines) * (2_000 // len(lines))
    best, read = 0.0, 0
    for _ in range(ROUNDS):
        started, done = time.process_time(), 0
        while time.process_time() - started < SECONDS_MIN:
            for line in batch:
                book.match_line(line)
            done += len(batch)
        best = max(best, done / (time.process_time() - started))
        read += done
    return round(best), "lines/s", read
