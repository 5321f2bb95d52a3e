"""Whatever is wrong at the command line is one sentence that says what to do; nothing is lost, the rest goes on."""

from __future__ import annotations

import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest

from ingest.clock import SystemClock
from ingest.dead_letters import original
from ingest.sqlite_bus import SqliteBus
from pipelines.__main__ import main
from pipelines.ledger.client import LedgerClient
from pipelines.places import Places
from pipelines.settings import Settings
from tests.commands import TIMEOUT_SECONDS, Commands, Said, commands_in, line_of, until

SLEEPS = "import time; print('rank runs', flush=True); time.sleep(600)\n"
SAYS_ARGUMENTS = "import sys; print('arguments', sys.argv[1:])\n"
TOKEN = "0123456789abcdef"


@pytest.fixture
def commands() -> Iterator[Commands]:
    with tempfile.TemporaryDirectory(prefix="bad-") as folder, commands_in(Path(folder)) as commands:
        (commands.folder / "sleeps.py").write_text(SLEEPS)
        yield commands


Typed = Callable[..., Said]


@pytest.fixture
def typed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Typed]:
    """A command in this process, by the entry that a person's command takes, in an empty folder with a short path."""
    folder = tempfile.TemporaryDirectory(prefix="bad-")
    monkeypatch.chdir(folder.name)
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def run(*words: str) -> Said:
        monkeypatch.setattr("sys.argv", ["transom", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Said(code if isinstance(code, int) else -1, *capsys.readouterr())

    with folder:
        yield run
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.fixture(scope="module")
def house() -> Iterator[tuple[Commands, Popen[str]]]:
    """`transom up` without the extras `ui` and `detect`, so without a console and without the ensemble."""
    with tempfile.TemporaryDirectory(prefix="bad-") as folder, commands_in(Path(folder)) as commands:
        up = commands.start("up", "--state-dir", "s", hidden=["streamlit", "pyod"])
        line_of(up, "record, detect and recover run")
        assert "transom[ui]" in line_of(up, "no console")
        yield commands, up
        said = commands.end(up, signal.SIGINT)
        assert (said.code, said.err) == (0, "")
        assert not commands.alive(), "Ctrl-C ends all services"


def ledger_of(commands: Commands) -> LedgerClient:
    return LedgerClient(Places.of(Settings(state_dir=commands.folder / "s")).api_socket)


@pytest.fixture(scope="module")
def job() -> Iterator[Commands]:
    """A job named `small` that runs, without services, and may not be broken on purpose."""
    with tempfile.TemporaryDirectory(prefix="bad-") as folder, commands_in(Path(folder)) as commands:
        (commands.folder / "sleeps.py").write_text(SLEEPS)
        running = commands.start(
            "run", "--state-dir", "s", "--job", "small", "--no-checkpoints", "sleeps.py", hidden=["torch"]
        )
        line_of(running, "rank runs")
        yield commands


SETTINGS_REFUSED = [
    ("[bus]\nkindd = 'kafka'\n", "unknown setting 'bus.kindd'"),
    ("[detect]\nensemble = 'perhaps'\n", "'detect.ensemble'"),
    ("state_dir = [\n", "is not TOML"),
]


@pytest.mark.parametrize(("text", "said"), SETTINGS_REFUSED)
def test_wrong_settings_are_refused(typed: Typed, text: str, said: str) -> None:
    Path("transom.toml").write_text(text)
    assert said in typed("topics", "create").sentence()


def test_a_service_refuses_a_mode_of_a_class_that_is_none(commands: Commands) -> None:
    (commands.folder / "transom.toml").write_text("[recover.modes]\ngpu_lots = 'auto'\n")
    assert "gpu_lots" in commands.run("recover", "--state-dir", "s").sentence()


EXTRAS = [
    ("duckdb", "record", "ledger"),
    ("uvicorn", "record", "ledger"),
    ("fastapi", "up", "ledger"),
    ("httpx", "incidents", "ledger"),
    ("kafka", "topics create --bus kafka", "kafka"),
    ("streamlit", "console", "ui"),
    ("torch", "demo --headless", "ckpt"),
]


def test_a_missing_extra_is_named_by_the_command_that_needs_it(commands: Commands) -> None:
    started = [commands.start(*words.split(), "--state-dir", "s", hidden=[hidden]) for hidden, words, _ in EXTRAS]
    for process, (_, _, extra) in zip(started, EXTRAS, strict=True):
        assert f"pip install 'transom[{extra}]'" in commands.end(process).sentence()


def test_doctor_says_what_is_missing_in_a_broken_environment(commands: Commands) -> None:
    hidden = ["pyod", "duckdb", "streamlit", "torch", "kafka", "kubernetes"]
    said = commands.run("doctor", "--state-dir", "s", "--bus", "kafka", hidden=hidden)
    assert said.code == 1, "the configured bus cannot be had"
    assert "Traceback" not in said.err
    text = "".join(said.out.split())
    for extra in ("detect", "ledger", "ui", "ckpt", "kafka", "k8s"):
        assert f"pipinstall'transom[{extra}]'" in text


def test_doctor_says_where_the_state_folder_is_no_folder(typed: Typed) -> None:
    Path("file").touch()
    said = typed("doctor", "--state-dir", "file/s")
    assert said.code == 1
    assert "set state_dir in transom.toml" in " ".join(said.out.split())


def test_a_rank_without_torch_trains_and_its_checkpointer_names_the_extra(commands: Commands) -> None:
    (commands.folder / "train.py").write_text("import transom\ntransom.init().log(step=1, loss=1.0)\nprint('trained')")
    said = commands.run("run", "--state-dir", "s", "train.py", hidden=["torch"])
    assert (said.code, "trained" in said.out) == (0, True)
    (commands.folder / "saves.py").write_text("import transom\ntransom.Checkpointer()\n")
    said = commands.run("run", "--state-dir", "s", "saves.py", hidden=["torch"])
    assert said.code == 1
    assert "transom.Checkpointer needs PyTorch, which is not installed; run: pip install 'transom[ckpt]'" in said.out


def test_a_taken_port_is_said_before_anything_is_started(commands: Commands) -> None:
    (commands.folder / "token").write_text(TOKEN)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        record = {"TRANSOM_RECORD__HOST": "127.0.0.1", "TRANSOM_RECORD__TOKEN_FILE": "token"}
        started = [
            commands.start("up", "--state-dir", "s", TRANSOM_CONSOLE__PORT=port),
            commands.start("record", "--state-dir", "s", TRANSOM_RECORD__PORT=port, **record),
        ]
        for process in started:
            assert f"127.0.0.1:{port} (Address already in use); choose another port" in commands.end(process).sentence()
    assert not (commands.folder / "s" / "logs").exists()


def test_a_console_for_others_needs_what_its_refusals_say(
    commands: Commands, typed: Typed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRANSOM_CONSOLE__HOST", "0.0.0.0")
    words = ("console", "--port", "0", "--state-dir", "s")
    assert "--open-to-others with --token-file" in typed(*words).sentence()
    assert "pass --token-file" in typed(*words, "--open-to-others").sentence()
    Path("token").write_text("short")
    assert "at least 16" in typed(*words, "--open-to-others", "--token-file", "token").sentence()
    (commands.folder / "token").write_text(TOKEN)
    console = commands.start(*words, "--open-to-others", "--token-file", "token")
    assert "http://0.0.0.0:" in line_of(console, "http")
    console.kill()
    console.communicate()


def test_a_state_folder_or_socket_folder_that_cannot_be_used_is_said(typed: Typed) -> None:
    Path("file").touch()
    assert "set state_dir to a folder that can" in typed("topics", "create", "--state-dir", "file/s").sentence()
    Path("wide/run").mkdir(parents=True, mode=0o755)
    assert "chmod it to 0700" in typed("incidents", "--state-dir", "wide").sentence()
    Path("other").mkdir()
    Path("other/run").touch()
    assert "other/run cannot be made" in typed("ckpt", "ls", "--job", "j", "--state-dir", "other").sentence()


def test_a_dead_broker_at_the_start_is_one_sentence_and_burns_no_job_name(commands: Commands) -> None:
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        started = [
            commands.start(*words, "--state-dir", "s", "--bootstrap-servers", address, *rest)
            for words, rest in [
                (["detect"], []), (["up", "--no-console"], []), (["run", "--job", "j"], ["sleeps.py"]),
            ]
        ]  # fmt: skip
        for process in started:
            sentence = commands.end(process).sentence()
            assert f"no Kafka broker at {address} answered within 10 s" in sentence
    assert not (commands.folder / "s" / "jobs" / "j").exists()


NOT_THERE = [
    ("replay none", "there is no none; give a recording"),
    ("ckpt verify none", "there is no folder none"),
    ("ckpt verify .", "there is no complete checkpoint in ."),
    ("ckpt inspect none --step 1", "there is no folder none"),
    ("ckpt ls --job none", "there is no job 'none'"),
    ("inject kill --job none --rank 0", "there is no job 'none'"),
    ("incidents", "start it with `transom up` or `transom record`"),
    ("explain none", "start it with `transom up` or `transom record`"),
    ("demo --faults earthquake", "there is no fault 'earthquake'"),
    ("run none.py", "there is no script none.py"),
    ("run --job ../up sleeps.py", "the job name '../up' is not usable"),
    ("run --max-restarts=3 sleeps.py", "set recover.restarts_max"),
    ("run --master_port 29500 sleeps.py", "each attempt gets a free port"),
    ("run --nnodes 2 sleeps.py", "use --virtual-nodes"),
    ("run --frobnicate sleeps.py", "has no flag --frobnicate"),
]


@pytest.mark.parametrize(("words", "said"), NOT_THERE)
def test_what_is_not_there_or_cannot_be_done_is_one_sentence(typed: Typed, words: str, said: str) -> None:
    Path("sleeps.py").write_text(SLEEPS)
    assert said in typed(*words.split()).sentence()


def test_an_engine_for_a_job_that_is_none_is_refused(commands: Commands) -> None:
    said = commands.run("ckpt", "serve", "--job", "none", "--node", "node0", "--state-dir", "s")
    assert "there is no job 'none'" in said.sentence()


def test_flags_after_the_script_are_the_scripts(commands: Commands) -> None:
    (commands.folder / "says.py").write_text(SAYS_ARGUMENTS)
    theirs = ["--lr", "1", "--config", "x", "--state-dir=y", "-m", "--nnodes", "3", "--", "--help"]
    said = commands.run(
        "run",
        "--standalone",
        "--nnodes=1",
        "--state-dir",
        "s",
        "--no-checkpoints",
        "says.py",
        *theirs,
        hidden=["torch"],
    )
    assert said.code == 0
    assert f"arguments {theirs}" in said.out


def test_without_recovery_a_failed_rank_ends_the_job_and_says_why(commands: Commands) -> None:
    (commands.folder / "fails.py").write_text("raise SystemExit(7)\n")
    said = commands.run("run", "--state-dir", "s", "--no-checkpoints", "fails.py", hidden=["torch"])
    assert said.code == 1
    assert "failed; rank 0 ended with exit code 7, and no `transom recover` runs here to restart the job" in said.err


def test_what_a_running_job_refuses(job: Commands) -> None:
    for words, said in [
        ("inject kill --job small --rank 0", "--allow-inject"),
        ("inject kill --job small --rank 9", "no rank 9"),
        ("inject quake --job small --rank 0", "there is no fault 'quake'"),
        ("run --job small sleeps.py", "there is already a job 'small'"),
    ]:
        first, *rest = words.split()
        assert said in job.run(first, "--state-dir", "s", *rest).sentence()


def test_services_that_may_be_there_once_refuse_a_second_and_lose_nothing(
    house: tuple[Commands, Popen[str]], typed: Typed
) -> None:
    commands, up = house
    holder = next(pid for pid, words in commands.alive().items() if "pipelines record" in words)
    seconds = [commands.start(name, "--state-dir", "s") for name in ("record", "recover", "up")]
    record, recover, other = [commands.end(second).sentence() for second in seconds]
    assert f"held by process {holder} " in record
    assert "`transom incidents`" in record
    assert "recovery already runs here (process" in recover
    assert "record and recover already run on" in other
    assert up.poll() is None
    with ledger_of(commands) as ledger:
        assert ledger.health().status == "ok"
    state = str(commands.folder / "s")
    assert "none" in typed("explain", "none", "--state-dir", state).sentence()


def test_the_ensemble_is_off_without_its_extra_and_detection_says_so(house: tuple[Commands, Popen[str]]) -> None:
    log = (house[0].folder / "s" / "logs" / "detect.log").read_text()
    assert "the ensemble is off: PyOD is not installed: pip install 'transom[detect]'" in log


def test_malformed_and_oversized_messages_become_dead_letters_and_the_services_go_on(
    house: tuple[Commands, Popen[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    commands, up = house
    services = {pid for pid, words in commands.alive().items() if "pipelines" in words}
    bus = SqliteBus(commands.folder / "s" / "bus.sqlite", clock=SystemClock())
    monkeypatch.setattr("ingest.sqlite_bus.refuse_oversized", lambda *_: None)  # a producer that is not ours
    junk = {
        "metrics": [b"", b"\xff\xfe", b"{}", b"x" * 2_000_000],
        "logs": [b"null"],
        "events": [b'{"job": 7}'],
        "verdicts": [b"[]", b"y" * 2_000_000],
        "commands": [b"\0" * 100],
    }
    typed = (("ce_specversion", b"1.0"), ("ce_type", b"org.transom.metrics.v1"), ("content-type", b"application/json"))
    producer = bus.producer()
    for topic, values in junk.items():
        for value in values:
            for headers in ((), typed):
                producer.send(topic, "junk", headers, value)
    producer.flush(10.0)
    producer.close()
    consumer = bus.consumer("test", ("dead-letters",))
    letters: list[tuple[str, int]] = []

    def complete() -> bool:
        for letter in consumer.poll(100, 0.1):
            headers = dict(letter.headers)
            kept = original(letter)[1]
            length = int(headers.get("dlq_value_bytes", str(len(kept))))
            letters.append((headers["dlq_topic"].decode(), length))
        return all(letters.count((topic, len(value))) >= 2 for topic, values in junk.items() for value in values)

    until(complete, "every bad message is among the dead letters")
    consumer.close()
    bus.close()
    assert up.poll() is None
    assert services <= set(commands.alive()), "no service fell"
    with ledger_of(commands) as ledger:
        assert ledger.health().status == "ok"


def test_ctrl_c_ends_a_job_and_leaves_no_process_behind(commands: Commands) -> None:
    running = commands.start(
        "run",
        "--state-dir",
        "s",
        "--job",
        "j",
        "--nproc-per-node",
        "2",
        "--virtual-nodes",
        "2",
        "sleeps.py",
        hidden=["torch"],
    )
    for _ in range(4):
        line_of(running, "rank runs")
    assert len(commands.alive()) > 9
    said = commands.end(running, signal.SIGINT)
    assert said.code == 130
    assert said.err.strip().endswith("job j: stopped by a signal")
    assert not commands.alive()


def test_a_signal_while_a_job_starts_ends_it(commands: Commands) -> None:
    running = commands.start("run", "--state-dir", "s", "--job", "j", "--nproc-per-node", "2", "sleeps.py")
    until((commands.folder / "s" / "jobs" / "j" / "job.json").exists, "the job has a name")
    assert commands.end(running, signal.SIGTERM).code == 143
    assert not commands.alive()
    assert b'"stopped"' in (commands.folder / "s" / "jobs" / "j" / "outcome.json").read_bytes()


def test_a_signal_ends_an_engine_that_still_waits_for_the_bus(commands: Commands) -> None:
    """It takes signals by itself once it serves; one that comes before must not be swallowed."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        silent.settimeout(TIMEOUT_SECONDS)
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        for words in (("ckpt", "serve"), ("launcher",)):
            process = commands.start(*words, "--job", "j", "--node", "n", "--bootstrap-servers", address)
            with silent.accept()[0]:
                assert commands.end(process, signal.SIGTERM).code == -signal.SIGTERM


def test_ctrl_c_ends_the_demo_with_all_it_started(commands: Commands) -> None:
    demo = commands.start("demo", "--headless", "--state-dir", "s", TRANSOM_CONSOLE__PORT="0", PYTHONUNBUFFERED="1")
    line_of(demo, "console  http://127.0.0.1:")
    until(lambda: any("zygote" in words for words in commands.alive().values()), "the demo's job starts")
    said = commands.end(demo, signal.SIGINT)
    assert said.code == 130
    assert "Traceback" not in said.err
    assert not commands.alive()
    assert os.listdir(commands.folder / "s" / "demo")  # noqa: PTH208 - what it did is kept
