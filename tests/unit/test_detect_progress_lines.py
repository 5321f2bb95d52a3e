"""Progress lines of the usual trainers, the life of a job in its log, and what stands before a line."""

# ruff: noqa: E501 - log lines are as long as they are

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from detectors.logs.line_prefixes import strip_prefixes
from detectors.logs.progress_lines import parse_lifecycle, parse_progress, read_bar
from detectors.logs.rule_book import RuleBook
from tests.log_lines import BENIGN

RULES = RuleBook.shipped()
MEGATRON = "iteration    31214/  115311 | consumed samples:     47768496 | elapsed time per iteration (ms): 105210.4 | lm loss: {loss} | grad norm: {norm} | number of skipped iterations:   0 | number of nan iterations:   {nan} |"
PROGRESS = {
    "megatron": (MEGATRON.format(loss="2.198845E+00", norm="0.242", nan=0), dict(step=31214, total=115311, loss=2.198845, grad_norm=0.242, samples=47768496, step_seconds=105.2104)),
    "trainer": ("{'loss': 2.31, 'grad_norm': 0.9, 'learning_rate': 5e-05, 'epoch': 0.4}", dict(loss=2.31, grad_norm=0.9, epoch=0.4)),
    "bar": ("Epoch 3:  45%|████▌     | 450/1000 [01:23<01:41,  5.00it/s, v_num=0, train_loss=2.310]", dict(step=450, total=1000, loss=2.31, step_seconds=0.2, epoch=3.0)),
    "deepspeed": ("steps: 10 loss: 2.3101 iter time (s): 0.812 samples/sec: 39.4", dict(step=10, loss=2.3101, step_seconds=0.812)),
    "nanogpt": ("iter 100: loss 3.2101, time 101.23ms, mfu 31.20%", dict(step=100, loss=3.2101, step_seconds=0.10123)),
    "titan": ("step: 10  loss:  8.1234  grad_norm: 1.2 memory: 30.12GiB(31.70%)  tps: 1,234", dict(step=10, loss=8.1234, grad_norm=1.2)),
    "mm": ("Epoch(train) [1][50/1000]  lr: 1.0000e-03  eta: 1:02:03  time: 0.3101  loss: 1.2011  grad_norm: 3.1", dict(step=50, total=1000, loss=1.2011, grad_norm=3.1)),
    "nemo": ("Training epoch 0, iteration 10/99 | lr: 0.0003 | global_step: 10 | reduced_train_loss: 10.31 | train_step_timing in s: 3.2 | consumed_samples: 5632", dict(step=10, loss=10.31, step_seconds=3.2, samples=5632)),
    "plain": ("step 143 loss 2.3101 grad norm 0.91", dict(step=143, loss=2.3101, grad_norm=0.91)),
}  # fmt: skip


@pytest.mark.parametrize("trainer", PROGRESS)
def test_a_progress_line_is_understood_and_consumed(trainer: str) -> None:
    line, expected = PROGRESS[trainer]
    progress = parse_progress(line)
    assert progress is not None
    assert progress.trainer == trainer
    assert {name: getattr(progress, name) for name in expected} == pytest.approx(expected)
    assert not progress.numbers_bad
    assert RULES.match_line(line) is None


@pytest.mark.parametrize(
    ("line", "bad"),
    [
        (MEGATRON.format(loss="nan", norm="0.2", nan=0), True),
        (MEGATRON.format(loss="2.1E+00", norm="nan", nan=0), True),
        (MEGATRON.format(loss="2.1E+00", norm="0.2", nan=2), True),
        (MEGATRON.format(loss="2.1E+00", norm="inf", nan=0), False),  # a loss scaler looks for its scale
        ("{'loss': nan, 'grad_norm': 0.9, 'epoch': 0.4}", True),
        ("{'loss': 0.0, 'grad_norm': nan, 'epoch': 0.4}", True),
        ("{'loss': 8.2, 'grad_norm': inf, 'learning_rate': 0.0, 'epoch': 0.0}", False),
        ("Epoch 3:  45%|████▌     | 450/1000 [01:23<01:41,  5.42it/s, train_loss=nan]", True),
        ("iter 100: loss nan, time 101.23ms, mfu 31.20%", True),
        ("step: 10  loss:  -inf  grad_norm: 1.2 memory: 30.12GiB(31.70%)", True),
        ("step 12 loss 2.1 information 4 nanobatch 3", False),
        ("step 12 loss 2.1 best_metric inf", False),
    ],
)
def test_bad_numbers_are_told_by_numbers_and_nothing_else(line: str, bad: bool) -> None:
    bar = read_bar(line)
    assert bar is not None
    assert bar.numbers_bad is bad
    progress = parse_progress(line)
    assert progress is not None
    assert progress.numbers_bad is bad
    hit = RULES.match_line(line)
    assert (hit is not None and hit.rule.id == "nan") is bad


def test_an_error_glued_to_a_bar_is_read_and_a_bar_behind_a_bar_is_not() -> None:
    bar = " 1%|▏| 1021/100000 [45:39<51:20:53,  1.87s/it]"
    hit = RULES.match_line(f"{bar}[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB")
    assert hit is not None
    assert hit.rule.id == "cuda_oom"
    assert RULES.match_line(f"{bar}, loss=2.1") is None
    assert RULES.match_line(bar + bar) is None


@given(st.text(alphabet="0123456789naif.,:=|[]{}'%/ stepitrlowgmdE+-", max_size=120))
def test_what_is_a_bar_is_a_progress_and_both_agree_on_the_shape(text: str) -> None:
    assert (read_bar(text) is None) == (parse_progress(text) is None)


LIFE = [
    ("saving checkpoint at iteration    4000 to /ckpt in torch_dist format", "checkpoint_begun", 4000),
    ("  successfully saved checkpoint from iteration     400 to /ckpt [ t 1/8, p 1/1 ]", "checkpoint_done", 400),
    ("Saving model checkpoint to /ckpt/checkpoint-500", "checkpoint_begun", 500),
    ("[2024-05-01 10:00:00,123] [INFO] [torch_checkpoint_engine.py:21:save] [Torch] Saving /c/global_step500/x.pt...", "checkpoint_begun", 500),
    (" successfully loaded checkpoint from /ckpt [ t 1/8, p 1/1 ] at iteration 4000", "checkpoint_loaded", 4000),
    ("***** Running Evaluation *****", "eval_begun", None),
    (" validation loss at iteration 1000 | lm loss value: 2.3E+00 |", "eval_done", 1000),
    ("***** Running training *****", "training_begun", None),
    ("[after training is done] datetime: 2024-05-01 10:00:00", "training_done", None),
    ("INFO:torch.distributed.elastic.agent.server.api:[default] Starting worker group", "workers_started", None),
]  # fmt: skip


@pytest.mark.parametrize(("line", "what", "step"), LIFE)
def test_the_life_of_a_job_is_read_and_consumed(line: str, what: str, step: int | None) -> None:
    life = parse_lifecycle(strip_prefixes(line))
    assert life is not None
    assert (life.what, life.step) == (what, step)
    assert RULES.match_line(line) is None


def test_a_failed_worker_group_tells_how_often_it_may_still_start() -> None:
    life = parse_lifecycle("[default] Worker group FAILED. 2/3 attempts left; will restart worker group")
    assert life is not None
    assert (life.what, life.attempts_left, life.attempts_max) == ("workers_failed", 2, 3)
    size = parse_lifecycle("using world size: 64, data-parallel size: 8")
    assert size is not None
    assert (size.what, size.world_size) == ("world_size", 64)


PREFIXED = [
    "[rank3]: hello",
    "[default7]: hello",
    "[rank0]:[rank0]: hello",
    "12: hello",
    "[1,23]<stderr>:hello",
    "(RayTrainWorker pid=3738, ip=172.17.130.64) hello",
    "Apr 12 00:54:42 node-7 kernel: [  102.331000] hello",
    "2024-05-01T10:00:00.123456789Z stderr F hello",
    "2024-05-01 10:00:00,123 - root - ERROR - hello",
    "<3>[  308.550258] hello",
    "[Wed Sep 26 00:34:02 2018] hello",
    "worker-3  | hello",
    "192.0.2.7: hello",
    "\x1b[31;1m[rank2]:\x1b[0m hello",
    "\x1b]8;;file:///a\x07hello",
    "kernel: hello",
]


@pytest.mark.parametrize("line", PREFIXED)
def test_what_stands_before_a_line_comes_off(line: str) -> None:
    assert strip_prefixes(line) == "hello"


@pytest.mark.parametrize(
    "line", ["RuntimeError: no host", "Epoch 3: fine", "loss: 2.1", "step 12: loss 2.1", "iteration  3/ 10 | x |"]
)
def test_words_before_a_colon_are_not_taken_for_a_host(line: str) -> None:
    assert strip_prefixes(line) == line


def test_only_the_beginning_of_a_huge_line_is_looked_at() -> None:
    assert len(strip_prefixes("x" * 100_000)) == 4096


def test_the_corpus_of_harmless_lines_is_large() -> None:
    assert len(set(BENIGN)) > 200


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("step 812: loss.backward() raised torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", "cuda_oom"),
        ("Saving checkpoint to /ckpt/iter_0000400 failed: [Errno 28] No space left on device", "disk_full"),
        ("Loaded checkpoint /ckpt/iter_0000400: PytorchStreamReader failed locating file data.pkl", "ckpt_corrupt"),
    ],
)  # fmt: skip
def test_a_failure_that_begins_as_progress_or_as_ordinary_life_is_heard(line: str, rule: str) -> None:
    hit = RULES.match_line(line)
    assert hit is not None
    assert hit.rule.id == rule
