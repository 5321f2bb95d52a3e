"""The process that ranks are forked from: it has imported torch once, and has made nothing with it.

Started by path and importing nothing of ours: what a rank finds in sys.modules is the standard library, torch
and what the user asked for. It has one thread and forks from it, so that the kernel's parent-death signal is
tied to the process. Frames on the socket of argv[1]: 4 bytes of length, then JSON; descriptors ride along.

    in   {"settings": …} once, then {"fork": id, …} with stdout, stderr, a stacks file, an error file; where there is
         {"run": settings} in it, that is run in place of the rank's script (a pre-flight check)
    out  {"ready": …}, {"forked": id, "pid": …} with a pidfd, {"refused": id, "reason": …}, {"exited": pid, …}
"""

from __future__ import annotations

import atexit
import builtins
import ctypes
import faulthandler
import gc
import importlib
import importlib.machinery
import io
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import sys
import threading
import types
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

TORCH_MODULES = ("torch", "torch._dynamo", "torch.optim", "torch.nn.parallel", "torch.distributed")
ARM_SECONDS_MAX = 5.0
FRAME_BYTES_MAX = 1024 * 1024
ERROR_TEXT_CHARS_MAX = 16_000
PR_SET_PDEATHSIG = 1
PR_SET_NAME = 15
OWN_FRAMES = (__file__, "<frozen runpy>")  # not part of what a user calls the traceback

ZYGOTE_MAIN = sys.modules["__main__"]  # kept when the user's takes its place

_libc = ctypes.CDLL(None, use_errno=True)


def die_with(parent: int) -> None:
    """SIGKILL to us when `parent` ends; at once where it has ended already."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os.kill(os.getpid(), signal.SIGKILL)


class Frames:
    """Whole frames on the launcher's socket."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection

    def receive(self) -> tuple[dict[str, Any], list[int]]:
        """The next frame. Raises EOFError where the launcher is gone."""
        head, descriptors, _, _ = socket.recv_fds(self.connection, 4, 8)
        while len(head) < 4:
            head += self._more(4 - len(head))
        (size,) = struct.unpack(">I", head)
        if size > FRAME_BYTES_MAX:
            raise EOFError(f"a frame of {size} bytes: the launcher's socket is out of step")
        body = b""
        while len(body) < size:
            body += self._more(size - len(body))
        return json.loads(body), descriptors

    def send(self, frame: dict[str, Any], descriptors: list[int] | None = None) -> None:
        body = json.dumps(frame).encode()
        packet = struct.pack(">I", len(body)) + body
        sent = socket.send_fds(self.connection, [packet], descriptors or [])
        self.connection.sendall(packet[sent:])

    def _more(self, size: int) -> bytes:
        chunk = self.connection.recv(size)
        if not chunk:
            raise EOFError("the launcher closed the zygote's socket")
        return chunk


def preload(settings: dict[str, Any]) -> list[str]:
    """Import torch and what the user asked for; what could not be imported, in words."""
    problems = []
    for name in TORCH_MODULES if settings["torch"] else ():
        try:
            importlib.import_module(name)
        except ImportError as error:
            if getattr(error, "name", None) != "torch":  # a job without torch is a job
                problems.append(f"{name}: {error}")
            break
    sys.path.insert(0, search_folder(settings))
    try:
        for name in settings["preload"]:
            try:
                importlib.import_module(name)
            except Exception as error:  # noqa: BLE001  a user's module may raise anything; the rank will raise it again
                problems.append(f"{name}: {type(error).__name__}: {error}")
    finally:
        del sys.path[0]
    return problems


def search_folder(settings: dict[str, Any]) -> str:
    """What Python itself would put first on the path: the script's folder, or the working folder for -m."""
    return str(Path.cwd() if settings["module"] else Path(settings["script"]).resolve().parent)


def report_exits(frames: Frames) -> None:
    """Tell the launcher of every child that has ended."""
    while True:
        try:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            return
        if ended is None:
            return
        by_signal = ended.si_code != os.CLD_EXITED
        if by_signal or ended.si_status != 0:
            # Its workers must not hold its GPU or its output. Until it is reaped, its id is nobody else's.
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(ended.si_pid, signal.SIGKILL)
        os.waitpid(ended.si_pid, 0)
        frames.send({"exited": ended.si_pid, "signal" if by_signal else "code": ended.si_status})


def serve(frames: Frames) -> tuple[dict[str, Any], dict[str, Any], list[int]]:
    """Fork on request. Returns in a child only: settings, request, descriptors."""
    settings = frames.receive()[0]["settings"]
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)  # ends by SIGKILL, or when the launcher closes the socket
    woken, wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    problems = preload(settings)
    gc.collect()
    gc.freeze()  # the collector of a rank must not touch, and so copy, the pages it shares with us
    frames.send({"ready": os.getpid(), "problems": problems, "threads": len(list(Path("/proc/self/task").iterdir()))})
    selector = selectors.DefaultSelector()
    selector.register(frames.connection, selectors.EVENT_READ)
    selector.register(woken, selectors.EVENT_READ)
    while True:
        ready = {key.fd for key, _ in selector.select()}
        if woken in ready:
            os.read(woken, 4096)
            report_exits(frames)
        if frames.connection.fileno() in ready:
            request, descriptors = frames.receive()
            if fork(frames, request, descriptors):
                signal.set_wakeup_fd(-1)
                os.close(woken)
                os.close(wake)
                selector.close()
                frames.connection.close()
                return settings, request, descriptors


def fork(frames: Frames, request: dict[str, Any], descriptors: list[int]) -> bool:
    """Fork one rank; True in the child."""
    zygote = os.getpid()
    sys.stdout.flush()
    sys.stderr.flush()
    armed, arm = os.pipe2(os.O_CLOEXEC)
    try:
        pid = os.fork()
    except OSError as error:
        pid = -1
        frames.send({"refused": request["fork"], "reason": f"fork failed: {error.strerror}"})
    if pid == 0:
        die_with(zygote)
        os.setsid()  # after that: what is still in our session when we die could outlive us, and is hunted
        os.close(armed)
        os.close(arm)
        return True
    for descriptor in (*descriptors, arm):
        os.close(descriptor)
    if pid > 0:
        # Nobody hears of a rank that could still outlive us, were it stopped now. It closes `arm`, or ends.
        told = select.poll()
        told.register(armed, select.POLLIN)
        told.poll(1_000 * ARM_SECONDS_MAX)
        pidfd = os.pidfd_open(pid)
        frames.send({"forked": request["fork"], "pid": pid}, [pidfd])
        os.close(pidfd)
    os.close(armed)
    return False


def become_rank(request: dict[str, Any], descriptors: list[int]) -> int:
    """Make this child what a fresh interpreter would be. Returns the descriptor of its error file."""
    stdout, stderr, stacks, errors = descriptors
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (stdout, 1), (stderr, 2)):
        os.dup2(source, target)
        os.close(source)
    for private in (stacks, errors):
        os.set_inheritable(private, False)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    _libc.prctl(PR_SET_NAME, request["name"].encode()[:15])
    os.environ.update(request["env"])
    if request["cpus"]:
        os.sched_setaffinity(0, request["cpus"])
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # a rank that is killed must have said what it printed
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is not None:
        numpy_random.seed()  # or all ranks would draw what the zygote was seeded with
    faulthandler.enable(file=2)
    faulthandler.register(request["stacks_signal"], file=stacks, all_threads=True, chain=False)
    gc.enable()
    return errors


def run(settings: dict[str, Any]) -> None:
    """What `python script args` or `python -m module args` does."""
    script = settings["script"]
    sys.argv = [script, *settings["argv"]]
    sys.path.insert(0, search_folder(settings))
    if settings["module"]:
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    elif Path(script).is_dir() or script.endswith((".zip", ".pyz", ".pyc")):
        del sys.path[0]
        runpy.run_path(script, run_name="__main__")
    else:
        run_file(script)


def run_file(script: str) -> None:
    """A script as __main__, found by spawned workers as it would be under `python script`."""
    source = Path(script).read_bytes()
    module = types.ModuleType("__main__")
    module.__dict__.update(
        __file__=script,
        __builtins__=builtins,
        __loader__=importlib.machinery.SourceFileLoader("__main__", script),
        __cached__=None,
    )
    sys.modules["__main__"] = module
    exec(compile(source, script, "exec", dont_inherit=True), module.__dict__)


def say_error(error: BaseException, errors: int) -> None:
    """Print an uncaught exception as Python would, and leave it in the error file for the launcher."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in OWN_FRAMES:
        trace = trace.tb_next
    error = error.with_traceback(trace)
    import traceback  # loaded by torch anyway; not a cost of every fork

    kind = type(error)
    name = (
        kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__qualname__}"
    )
    try:
        text = str(error)
        lines = "".join(traceback.format_exception(kind, error, trace))
    except Exception as second:  # noqa: BLE001  a user's __str__ may raise anything
        text, lines = f"<its text cannot be had: {type(second).__name__}>", ""
    record = {"type": name, "text": text[:ERROR_TEXT_CHARS_MAX], "traceback": lines[-ERROR_TEXT_CHARS_MAX:]}
    os.pwrite(errors, json.dumps(record).encode(), 0)
    sys.excepthook(kind, error, trace)


def code_of(leaving: SystemExit) -> int:
    """The exit code as the interpreter would have it: what is no number is printed, and means 1."""
    if leaving.code is None or isinstance(leaving.code, int):
        return (leaving.code or 0) & 0xFF
    print(leaving.code, file=sys.stderr)
    return 1


def end(code: int) -> NoReturn:
    """What an interpreter does at its end, but for taking torch apart.

    That takes seconds, and prints pages: bindings count as leaked what the frozen collector has kept.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # joins the threads that are no daemons
    atexit._run_exitfuncs()
    streams = [thing for thing in gc.get_objects() if isinstance(thing, io.IOBase)]
    flushes = [*(stream.flush for stream in streams), sys.stdout.flush, sys.stderr.flush]
    closes = [stream.close for stream in streams if type(stream).__module__ not in ("_io", "io")]
    for step in (*flushes, *closes, *flushes):  # an archive that was left open writes its end when it is closed
        with suppress(Exception):  # a stream of the user's own may raise anything
            step()
    os._exit(code)


def main() -> None:
    gc.disable()
    die_with(int(sys.argv[2]))
    frames = Frames(socket.socket(fileno=int(sys.argv[1])))
    try:
        settings, request, descriptors = serve(frames)
    except (EOFError, ConnectionError, BrokenPipeError):
        os._exit(0)  # the launcher has gone; our ranks go with us
    errors = become_rank(request, descriptors)
    code = 0
    try:
        run(request["run"] or settings)
    except SystemExit as leaving:
        code = code_of(leaving)
    except BaseException as error:  # noqa: BLE001  whatever the user's code raises ends this rank, as in any interpreter
        say_error(error, errors)
        code = 130 if isinstance(error, KeyboardInterrupt) else 1
    end(code)


if __name__ == "__main__":
    main()
