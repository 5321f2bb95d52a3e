"""Makes the small historic runs of this folder with the libraries that people's programs use; run by hand.

    pip install tensorboard wandb pandas pyarrow torch; python data/historic/make.py

The numbers are made up and seeded, the files are what the libraries write of them. In each run something is wrong:
rank 2 of the table is slow from step 120 to 160, losses become NaN, a rank of torchrun's raises.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
BEGINS_AT = 1_760_000_000.0
RAISES = """
import os, time
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    rank = int(os.environ["RANK"])
    for step in range(1, 6):
        print(f"2025-10-09 08:53:{20 + step:02d} step {step} loss: {2.0 - 0.1 * step:.4f} lr 0.001", flush=True)
        time.sleep(0.05)
    if rank == 1:
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied (8x16 and 32x8)")
    time.sleep(30)
main()
"""


def table() -> None:
    """Parquet and CSV of one table: four ranks, two nodes, rank 2 slow for forty steps."""
    import pandas as pd

    dice = random.Random(1)
    rows = []
    clock = BEGINS_AT
    for step in range(240):
        compute = {rank: 0.4 * (1 + 0.01 * dice.gauss(0, 1)) for rank in range(4)}
        if 120 <= step < 160:
            compute[2] *= 1.6
        clock += max(compute.values()) + 0.1
        for rank in range(4):
            rows.append({
                "rank": rank, "host": f"n{rank // 2}", "iteration": step, "timestamp": round(clock, 3),
                "step_time_ms": round(1e3 * (max(compute.values()) + 0.1), 2), "compute_time": round(compute[rank], 5),
                "loss": round(2.5 - 0.004 * step + 0.01 * dice.gauss(0, 1), 5),
            })  # fmt: skip
    frame = pd.DataFrame(rows)
    frame.to_parquet(HERE / "table.parquet", index=False)
    (HERE / "ranks-csv").mkdir(exist_ok=True)
    for rank, own in frame.groupby("rank"):
        own.drop(columns=["rank"]).to_csv(HERE / "ranks-csv" / f"rank_{rank}.csv", index=False)


def json_lines() -> None:
    """As a training loop writes it: the loss is NaN from step 60 on."""
    dice = random.Random(2)
    with (HERE / "metrics.jsonl").open("w", encoding="utf-8") as file:
        for step in range(80):
            loss = float("nan") if step >= 60 else round(2.0 - 0.01 * step + 0.01 * dice.gauss(0, 1), 4)
            told = {"_step": step, "_timestamp": BEGINS_AT + step, "train/loss": loss, "lr": 1e-4, "tag": "run 1"}
            file.write(json.dumps(told) + "\n")


def tensorboard() -> None:
    """Two ranks, each with a folder of its own; the loss of rank 1 becomes NaN first."""
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from torch.utils.tensorboard import SummaryWriter

    for rank in range(2):
        folder = HERE / "tensorboard" / f"rank_{rank}"
        shutil.rmtree(folder, ignore_errors=True)
        dice = random.Random(rank)
        writer = SummaryWriter(str(folder), filename_suffix=f".rank{rank}")
        for step in range(60):
            loss = float("nan") if step >= 40 + (rank == 0) else 2.0 - 0.01 * step + 0.01 * dice.gauss(0, 1)
            values = {"train/loss": loss, "train/step_time": 1.0 + 0.01 * dice.gauss(0, 1)}
            told = [Summary.Value(tag=tag, simple_value=value) for tag, value in values.items()]
            event = Event(wall_time=BEGINS_AT + step, step=step, summary=Summary(value=told))
            writer.file_writer.event_writer._async_writer.write(event.SerializeToString())  # with a time of our own
        writer.close()
        for file in folder.iterdir():
            file.rename(folder / f"events.out.tfevents.{int(BEGINS_AT)}.host.{rank}")


def wandb_runs() -> None:
    """Two offline runs of one group, one for each rank; a spike of the gradient's norm, then NaN on rank 0."""
    with tempfile.TemporaryDirectory() as scratch:
        os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true", WANDB_DIR=scratch, WANDB_ERROR_REPORTING="false",
                          WANDB_DISABLE_CODE="true", WANDB_DISABLE_GIT="true")  # fmt: skip
        import wandb

        quiet = wandb.Settings(x_disable_stats=True, console="off", x_disable_meta=True, host="n0")
        for rank in range(2):
            dice = random.Random(rank)
            run = wandb.init(project="demo", group="g", name=f"rank_{rank}", id=f"aaaa000{rank}", settings=quiet)
            for step in range(60):
                loss = float("nan") if rank == 0 and step >= 45 else 2.0 - 0.01 * step + 0.01 * dice.gauss(0, 1)
                run.log({"loss": loss, "perf": {"step_time": 1.0}, "_timestamp": BEGINS_AT + step}, step=step)
            run.finish()
        shutil.rmtree(HERE / "wandb", ignore_errors=True)
        for file in Path(scratch).rglob("*.wandb"):
            target = HERE / "wandb" / f"offline-run-{file.stem}"
            target.mkdir(parents=True)
            shutil.copy(file, target / file.name)


def torchrun_logs() -> None:
    """What `torchrun --log-dir` leaves of two ranks of which one raises."""
    with tempfile.TemporaryDirectory() as scratch:
        script = Path(scratch) / "train.py"
        script.write_text(RAISES, encoding="utf-8")
        logs = Path(scratch) / "logs"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--rdzv-backend=c10d",
                   "--rdzv-endpoint=127.0.0.1:0", "--log-dir", str(logs), "--redirects=3", str(script)]  # fmt: skip
        subprocess.run(command, check=False, capture_output=True)
        shutil.rmtree(HERE / "torchrun", ignore_errors=True)
        for file in logs.rglob("*.log"):
            target = HERE / "torchrun" / Path("none_run", *file.relative_to(logs).parts[1:])
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(file, target)


def trainer_logs() -> None:
    """Lines in the form of Megatron (through `srun -l`, rank 3 prints), and of Hugging Face and DeepSpeed."""
    dice = random.Random(5)
    slurm = []
    for step in range(1, 61):
        nan = step >= 50
        loss = "nan" if nan else f"{9.0 - 0.05 * step + 0.02 * dice.gauss(0, 1):.6E}"
        slurm.append(
            f"3:  [2025-10-09 08:{53 + step // 60:02d}:{step % 60:02d}] iteration {step:8d}/     500 |"
            f" consumed samples: {step * 64:12d} | elapsed time per iteration (ms): {1000 + 5 * dice.gauss(0, 1):.1f} |"
            f" learning rate: 1.0E-04 | global batch size:    64 | lm loss: {loss} | loss scale: 1.0 |"
            f" grad norm: {'nan' if nan else '0.842'} | number of skipped iterations:   0 |"
            f" number of nan iterations:   {int(nan)} |"
        )
    slurm.append("slurmstepd: error: *** STEP 4711.0 ON n1 CANCELLED AT 2025-10-09T08:54:30 DUE TO TIME LIMIT ***")
    (HERE / "slurm").mkdir(exist_ok=True)
    (HERE / "slurm" / "slurm-4711.out").write_text("\n".join(slurm) + "\n", encoding="utf-8")
    trainer = [
        f"{{'loss': {2.0 - 0.02 * step:.4f}, 'grad_norm': 1.1, 'learning_rate': 5e-05, 'step': {step}, 'epoch': 0.1}}"
        for step in range(1, 41)
    ]
    trainer.append("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 4.35 GiB. GPU 0 has a total capacity"
                   " of 63.42 GiB of which 1.70 GiB is free.")  # fmt: skip
    (HERE / "trainer.log").write_text("\n".join(trainer) + "\n", encoding="utf-8")
    speed = [
        f"[2025-10-09 08:53:{step:02d},000] [INFO] [logging.py:96:log_dist] [Rank 0] step={step}, skipped=0,"
        f" lr=[0.0001], mom=[[0.9, 0.95]]\n"
        f"steps: {step} loss: {2.0 - 0.01 * step:.4f} iter time (s): 1.000 samples/sec: 64.0"
        for step in range(1, 31)
    ]
    (HERE / "deepspeed.log").write_text("\n".join(speed) + "\n", encoding="utf-8")


if __name__ == "__main__":
    for make in (table, json_lines, tensorboard, wandb_runs, torchrun_logs, trainer_logs):
        make()
