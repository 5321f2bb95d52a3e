"""A rank is what `python train.py` would be: paths, names, exit codes, workers, and a clean interpreter under it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest

from ingest.events import RankExited
from recovery.backend import StartRequest
from tests.launcher_lab import JOB, Lab, lab_in_short_folder, wait_for


@pytest.fixture
def lab() -> Iterator[Lab]:
    with lab_in_short_folder(per_node=2) as lab:
        yield lab


def run(lab: Lab, attempt: int = 1) -> dict[int, RankExited]:
    """One attempt from start to end."""
    lab.backend.start(StartRequest(JOB, attempt, f"token-{attempt}"))

    def ended() -> Any:
        found = {exit.rank: exit for exit in lab.messages(RankExited) if exit.attempt == attempt}
        return len(found) == 2 and found

    return wait_for(ended, "both ranks have ended")


def said(lab: Lab) -> list[Any]:
    """The JSON lines that ranks printed."""
    return [json.loads(line) for line in lab.lines() if line.startswith(("{", "["))]


def test_a_script_finds_its_folder_its_arguments_and_itself_as_main(lab: Lab) -> None:
    script = lab.script("""
        from __future__ import annotations
        import json, os, sys
        import beside                                   # a module in the script's folder
        import ingest                                   # the user's own, not ours
        print(json.dumps({
            "argv": sys.argv, "name": __name__, "file": __file__, "spec": __spec__,
            "main": sys.modules["__main__"].__dict__ is globals(), "beside": beside.VALUE, "ingest": ingest.VALUE,
            "cwd": os.getcwd(), "path0": sys.path[0], "annotations": str(__annotations__),
            "ours": sorted(m for m in sys.modules if m.startswith(("recovery", "detectors", "pipelines"))),
            "threads": len(os.listdir("/proc/self/task")),
        }))
        def f(x: Undefined): ...
    """)
    (script.parent / "beside.py").write_text("VALUE = 7\n")
    (script.parent / "ingest.py").write_text("VALUE = 'mine'\n")
    lab.launch(script, argv=["--lr", "0.1"])
    run(lab)
    for rank in said(lab):
        assert rank["argv"] == [str(script), "--lr", "0.1"]
        assert (rank["name"], rank["file"], rank["spec"]) == ("__main__", str(script), None)
        assert (rank["main"], rank["beside"], rank["ingest"], rank["ours"]) == (True, 7, "mine", [])
        assert rank["path0"] == str(script.parent)
        assert rank["threads"] == 1


def test_a_module_runs_as_with_dash_m(lab: Lab, tmp_path: Any) -> None:
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "train.py").write_text(
        "import json, sys\nfrom . import other\n"
        "print(json.dumps([__name__, __spec__.name, sys.argv[1:], other.VALUE]))\nraise ValueError('in a module')\n"
    )
    (package / "other.py").write_text("VALUE = 3\n")
    lab.launch("package.train", module=True, argv=["x"], base_env={"PYTHONPATH": str(tmp_path)})
    told = run(lab)
    assert said(lab) == [["__main__", "package.train", ["x"], 3]] * 2
    error = told[0].error
    assert (error.type, error.text) == ("ValueError", "in a module")
    assert "runpy" not in error.traceback
    assert "zygote" not in error.traceback


ENDINGS = [
    ("pass", 0, None),
    ("sys.exit()", 0, None),
    ("sys.exit(7)", 7, None),
    ("sys.exit('in words')", 1, None),
    ("raise KeyError('x')", 1, None),
    ("raise KeyboardInterrupt", 130, None),
    ("os._exit(9)", 9, None),
    ("os.kill(os.getpid(), 6)", None, 6),
    ("this is no Python", 1, None),
]


def test_exit_codes_are_those_of_an_interpreter(lab: Lab) -> None:
    script = lab.script("")
    lab.launch(script)
    told = []
    for number, (ending, code, signal) in enumerate(ENDINGS):
        lab.script(f"import os, sys\n{ending}\n")
        told.append(run(lab, number + 1))
        assert {(exit.exit_code, exit.signal) for exit in told[-1].values()} == {(code, signal)}, ending
        assert lab.backend.stop(JOB, number + 1, grace_seconds=1, deadline_seconds=5)
    assert told[3][0].last_lines == ("in words",)
    assert (told[4][0].error.type, told[4][0].error.text) == ("KeyError", "'x'")
    assert told[8][0].error.type == "SyntaxError"


def test_what_an_interpreter_does_at_its_end_is_done(lab: Lab) -> None:
    script = lab.script("""
        import atexit, gzip, os, threading, time
        rank = os.environ["RANK"]
        here = os.path.dirname(__file__)
        left_open = open(f"{here}/open-{rank}", "w")
        left_open.write("kept")
        archive = gzip.open(f"{here}/archive-{rank}.gz", "wt")
        archive.write("whole")
        atexit.register(lambda: open(f"{here}/atexit-{rank}", "w").write("called"))
        threading.Thread(target=lambda: (time.sleep(0.3), print("thread ends"))).start()
        print("no newline", end="")
    """)
    lab.launch(script)
    assert {exit.exit_code for exit in run(lab).values()} == {0}
    for rank in (0, 1):
        assert (script.parent / f"open-{rank}").read_text() == "kept"
        assert (script.parent / f"atexit-{rank}").read_text() == "called"
        with gzip.open(script.parent / f"archive-{rank}.gz", "rt") as stream:
            assert stream.read() == "whole"
    assert "".join(lab.lines()).count("thread ends") == 2
    assert "".join(lab.lines()).count("no newline") == 2


def test_spawned_and_forked_workers_find_the_script(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import json, multiprocessing, os
        class Sample:
            def __init__(self, n): self.n = n
        def double(sample):
            return Sample(sample.n * 2)
        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                with multiprocessing.get_context(method).Pool(2) as pool:
                    print(json.dumps([method, [s.n for s in pool.map(double, [Sample(1), Sample(2)])]]))
    """)
    )
    told = run(lab)
    assert {exit.exit_code for exit in told.values()} == {0}, told[0].last_lines
    assert sorted(said(lab)) == [["fork", [2, 4]], ["fork", [2, 4]], ["spawn", [2, 4]], ["spawn", [2, 4]]]


def test_ranks_draw_different_numbers_although_they_are_forked(lab: Lab) -> None:
    script = lab.script("""
        import json, random, numpy.random, uuid
        print(json.dumps([random.random(), numpy.random.rand(), str(uuid.uuid4())]))
    """)
    lab.launch(script, preload=["numpy", "numpy.random", "random", "uuid"])
    run(lab)
    first, second = said(lab)
    assert not set(first) & set(second)


def test_preloaded_modules_are_there_and_one_that_fails_is_named(lab: Lab) -> None:
    script = lab.script("import sys, json\nprint(json.dumps(['heavy' in sys.modules, sys.path.count(sys.path[0])]))\n")
    (script.parent / "heavy.py").write_text("")
    (script.parent / "broken.py").write_text("raise RuntimeError('not today')\n")
    lab.launch(script, preload=["heavy", "broken", "absent"])
    run(lab)
    assert said(lab) == [[True, 1]] * 2
    assert "could not import broken: RuntimeError: not today" in lab.shown()
    assert "could not import absent" in lab.shown()


def test_descriptors_of_one_rank_are_not_in_another(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import json, os, time
        print(json.dumps(sorted(os.readlink(f"/proc/self/fd/{n}").split(":")[0].split(" ")[0]
              for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}") or int(n) < 3)), flush=True)
        time.sleep(1)
    """)
    )
    run(lab)
    for kinds in said(lab):
        assert kinds.count("pipe") == 2
        assert "socket" not in kinds


def test_ranks_are_pinned_side_by_side_where_that_is_asked(lab: Lab) -> None:
    lab.launch(lab.script("import json, os\nprint(json.dumps(sorted(os.sched_getaffinity(0))))\n"), pin_cpus=True)
    run(lab)
    assert all(len(cpus) == 1 for cpus in said(lab))


def test_a_terminal_signal_and_a_hook_of_the_users_are_honoured(lab: Lab) -> None:
    lab.launch(
        lab.script("""
        import os, sys
        def hook(kind, error, trace):
            print("hooked", kind.__name__, file=sys.stderr)
            os._exit(3)
        sys.excepthook = hook
        raise RuntimeError("for the hook")
    """)
    )
    exit = run(lab)[0]
    assert exit.exit_code == 3
    assert exit.last_lines == ("hooked RuntimeError",)
    assert exit.error.text == "for the hook"
