"""Runs of other libraries' trainers in forks of one process, because importing those takes longer than all the rest."""

from __future__ import annotations

import functools
import os
import signal
import socket
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

Tell = Callable[[object], None]


@dataclass(frozen=True)
class Ended:
    """What a run told, a line each, and how it ended: its exit code, or minus the signal."""

    lines: tuple[str, ...]
    code: int

    @property
    def losses(self) -> dict[int, str]:
        """By step, in all their bits."""
        pairs = [line.split() for line in self.lines if line.startswith("loss ")]
        return {int(step): bits for _, step, bits in pairs}


def forked(*runs: Callable[[Tell], None], environ: Mapping[str, str] | None = None) -> list[Ended]:
    """Each run in a child of its own, side by side, numbered as ranks of one job where there are several."""
    started = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
    for rank, run in enumerate(runs):
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(reading)
                os.environ.update(environ or {})
                if len(runs) > 1:
                    os.environ.update(
                        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(len(runs)), GROUP_RANK="0",
                        LOCAL_WORLD_SIZE=str(len(runs)), MASTER_ADDR="127.0.0.1", MASTER_PORT=port,
                        TORCHELASTIC_RUN_ID="test",
                    )  # fmt: skip
                run(functools.partial(_tell, writing))
                code = 0
            except BaseException:  # noqa: BLE001 - whatever it is, this is a child, and must not go on as the parent
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(writing)
        started.append((pid, reading))
    ended = []
    for pid, reading in started:
        with os.fdopen(reading, encoding="utf-8") as file:
            lines = tuple(file.read().splitlines())
        ended.append(Ended(lines, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))
    return ended


def _tell(descriptor: int, said: object) -> None:
    os.write(descriptor, f"{said}\n".encode())


def loss_line(step: int, loss: float) -> str:
    return f"loss {step} {float(loss).hex()}"


def die() -> None:
    """kill -9 of this process."""
    os.kill(os.getpid(), signal.SIGKILL)
