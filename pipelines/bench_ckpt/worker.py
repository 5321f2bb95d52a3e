"""One measuring process: it is told what to measure in one line of JSON, and answers in lines of JSON.

Its answers go to a descriptor of their own: what the measured libraries print belongs to nobody.
"""

from __future__ import annotations

import os
import sys

import msgspec

from pipelines.bench_ckpt.outcome import Line, Measure, Outcome, Task
from pipelines.own_process import go_with_parent


def measure_of(group: str) -> Measure:
    """What measures a group; imported here, because each brings in what only it needs."""
    if group == "save":
        from pipelines.bench_ckpt.saves import measure_saves as measure
    elif group == "fenced":
        from pipelines.bench_ckpt.fenced_saves import measure_fenced as measure
    elif group == "load":
        from pipelines.bench_ckpt.loads import measure_loads as measure
    elif group == "persist":
        from pipelines.bench_ckpt.persisting import measure_persisting as measure
    elif group == "peer":
        from pipelines.bench_ckpt.peer_restore import measure_peer_restore as measure
    elif group == "flips":
        from pipelines.bench_ckpt.flips import measure_flips as measure
    elif group == "roundtrips":
        from pipelines.bench_ckpt.roundtrips import measure_roundtrips as measure
    elif group == "growth":
        from pipelines.bench_ckpt.growth import measure_growth as measure
    elif group == "dedup":
        from pipelines.bench_ckpt.dedup import measure_dedup as measure
    elif group == "kills":
        from pipelines.bench_ckpt.campaigns import measure_kills as measure
    else:
        from pipelines.bench_ckpt.campaigns import not_yet

        return not_yet(group)
    return measure


def main() -> None:
    go_with_parent(os.environ)
    told_to = os.fdopen(int(sys.argv[1]), "wb", buffering=0)
    task = msgspec.json.decode(sys.stdin.buffer.read(), type=Task)

    def tell(line: Line) -> None:
        told_to.write(msgspec.json.encode(line) + b"\n")

    try:
        outcome = measure_of(task.group)(task, lambda text: tell(Line(told=text)))
    except Exception as error:  # noqa: BLE001 - it becomes the reason why the figures of this task are missing
        outcome = Outcome(values=[], missing={"": f"{type(error).__name__}: {error}"}, notes=[], rounds={})
    tell(Line(outcome=outcome))


if __name__ == "__main__":
    main()
