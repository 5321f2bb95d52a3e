"""The HTTP API in process: shapes, errors in one sentence, commands, tokens, Arrow."""

import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pyarrow as pa
import pytest

from ingest.bus import BusUnavailable
from ingest.clock import ManualClock
from ingest.memory_bus import MemoryBus
from pipelines.ledger.api import ARROW_STREAM, create_app
from pipelines.ledger.client import LedgerClient
from pipelines.ledger.exposition import Exposition
from pipelines.ledger.ledger import Ledger
from pipelines.ledger.posting import CommandDesk
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.serving import ApiServer, CannotServe, tcp_socket, unix_socket
from pipelines.ledger.shapes import (
    BadQuestion,
    CommandRequest,
    Health,
    LedgerBusy,
    LedgerUnavailable,
    NotInLedger,
)
from recovery.action import Command
from tests.ledger_messages import (
    CODEC,
    JOB,
    Tape,
    action,
    attempt_started,
    checkpoint,
    command,
    logs,
    metrics,
    receipt,
    transition,
    verdict,
)

INCIDENT = f"{JOB}/1/2/logs/1"


class House:
    """A ledger with a story, its API on a Unix socket and on TCP with a token, and the bus that takes commands."""

    def __init__(self, folder: Path) -> None:
        self.clock = ManualClock(1100.0)
        self.bus = MemoryBus(clock=self.clock)
        self.bus.create_topics(1)
        self.ledger = Ledger(folder / "ledger", self.clock)
        self.tape = Tape()
        health = Health(status="degraded", reason="the disk is full", lag={"metrics": 3}, data_at=1099.0)
        self.reader = LocalReader(
            self.ledger.cursor,
            self.ledger.state,
            self.ledger.parts,
            now=self.clock.now,
            health=lambda: health,
            post=CommandDesk(self.ledger.state, self.bus.producer(), self.clock, new_id=lambda: "c-1").post,
        )
        exposition = Exposition(self.ledger, lambda: health, dict, lambda: 2, self.clock.now)
        self.socket_path = folder / "run" / "ledger.sock"
        listener = tcp_socket("127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        self.servers = [
            ApiServer(create_app(self.reader, exposition.text), unix_socket(self.socket_path), name="unix"),
            ApiServer(create_app(self.reader, exposition.text, token="s3cret"), listener, name="tcp"),
        ]
        for server in self.servers:
            server.start()
        self.http = httpx.Client(transport=httpx.HTTPTransport(uds=str(self.socket_path)), base_url="http://ledger")
        self.client = LedgerClient(self.socket_path)

    def tell(self, *messages: object) -> None:
        self.ledger.append(self.tape.tell(*messages))
        self.ledger.commit(force=True)

    def close(self) -> None:
        self.http.close()
        self.client.close()
        for server in self.servers:
            server.stop()
        self.ledger.close()


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    house = House(tmp_path_factory.mktemp("h"))
    house.tell(attempt_started(), checkpoint(4), logs("first", "second"), logs("other rank", rank=1, sequence=1))
    house.tell(*(metrics(step, rank=rank, train_loss=1.0 + rank) for step in range(4) for rank in range(2)))
    house.tell(metrics(4, train_loss=math.nan))
    house.tell(verdict(1), action(1), transition(1), receipt(1), command(1), verdict(2, fault_class="hang"))
    yield house
    house.close()


def test_the_client_gives_what_the_ledger_knows(house: House) -> None:
    client, reader = house.client, house.reader
    assert client.jobs() == reader.jobs()
    assert client.jobs()[0].open_incidents == 2
    assert client.incidents() == reader.incidents()
    assert [view.fault_class for view in client.incidents(fault_class="hang").incidents] == ["hang"]
    assert client.incident(INCIDENT) == reader.incident(INCIDENT)
    assert client.incident(INCIDENT).verdicts == (verdict(1),)
    assert client.series(JOB, "train.loss") == reader.series(JOB, "train.loss")
    assert client.series(JOB, "train.loss").non_finite == [(0, 4, "nan")]
    assert client.metric_names(JOB) == ("train.loss", "train.step.duration")
    assert [line.text for line in client.logs(JOB)] == ["first", "other rank", "second"]
    assert [line.text for line in client.logs(JOB, rank=1)] == ["other rank"]
    assert [line.text for line in client.logs(JOB, limit=1)] == ["second"]
    assert client.health() == reader.health()
    for table in ("verdicts", "actions", "receipts", "transitions", "checkpoints", "events", "commands"):
        assert client.rows(table) == reader.rows(table)
        assert client.rows(table).rows, f"{table} is empty"


def test_the_json_has_the_documented_keys(house: House) -> None:
    (job,) = house.http.get("/v1/jobs").json()["jobs"]
    assert set(job) == {
        "job", "attempt", "state", "world_size", "started_at", "last_step", "last_seen_at", "goodput",
        "open_incidents", "checkpoint", "outcome", "measures",
    }  # fmt: skip
    assert set(job["checkpoint"]) == {"step", "tier", "event_at"}
    page = house.http.get("/v1/incidents", params={"limit": 1}).json()
    assert set(page) == {"incidents", "next"}
    assert set(page["incidents"][0]) >= {
        "seq", "incident_id", "job", "attempt", "fault_class", "severity", "status", "state", "culprits", "victims",
        "onset_at", "onset_step", "first_bad_step", "opened_at", "updated_at", "closed_at", "summary", "advice",
        "settled", "action", "outcome", "outcome_text", "acknowledged_by", "acknowledged_at", "feedback",
    }  # fmt: skip
    story = house.http.get(f"/v1/incidents/{INCIDENT}").json()
    assert set(story) == {"incident", "verdicts", "actions", "receipts", "transitions", "commands"}
    row = house.http.get("/v1/verdicts", params={"limit": 1}).json()["rows"][0]
    assert (row["seq"], row["kind"], row["fault_class"]) == (2, "verdict.v1", "hang")
    series = house.http.get("/v1/series", params={"job": JOB, "metric": "train.loss"}).json()
    assert series["ranks"]["0"][-1] == [1004.0, 4, None]
    assert series["median"][0] == [1000.0, 1.5]
    assert series["non_finite"] == [[0, 4, "nan"]]
    assert set(house.http.get("/healthz").json()) == {"status", "reason", "lag", "data_at"}


def test_series_come_as_an_arrow_stream_when_asked_for(house: House) -> None:
    answer = house.http.get("/v1/series", params={"job": JOB, "metric": "train.loss"}, headers={"Accept": ARROW_STREAM})
    assert answer.headers["content-type"] == ARROW_STREAM
    table = pa.ipc.open_stream(answer.content).read_all()
    assert table.column_names == ["rank", "place", "step", "event_at", "value"]
    assert table.num_rows == 9 + 4


def test_prometheus_metrics_have_our_prefix_and_no_rank_label(house: House) -> None:
    text = house.http.get("/metrics").text
    assert 'transom_ledger_rows_total{table="verdict"} 2.0' in text
    assert 'transom_incidents_open{severity="error"} 2.0' in text
    assert "transom_ledger_healthy 0.0" in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert all(name.startswith("transom_") for name in names)
    assert "rank=" not in text


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/v1/incidents/nobody", 404, "there is no incident 'nobody'"),
        ("/v1/nothing", 404, "/openapi.json"),
        ("/v1/verdicts?limit=1001", 422, "limit"),
        ("/v1/verdicts?limit=0", 422, "limit"),
        ("/v1/verdicts?after=x", 422, "after"),
        ("/v1/incidents?after=-1", 422, "after"),
        ("/v1/series?job=gpt", 422, "metric"),
        ("/v1/series?job=gpt&metric=x&buckets=2001", 422, "buckets"),
        ("/v1/logs", 422, "job"),
    ],
)
def test_a_wrong_question_is_one_sentence(house: House, path: str, status: int, words: str) -> None:
    answer = house.http.get(path)
    assert answer.status_code == status
    assert set(answer.json()) == {"error"}
    assert words in answer.json()["error"]
    assert "\n" not in answer.json()["error"]


def test_a_command_is_on_the_bus_before_the_answer(house: House) -> None:
    consumer = house.bus.consumer("test", ("commands",))
    request = CommandRequest(verb="feedback", incident_id=INCIDENT, author=" ada ", feedback="true_positive", note="n")
    assert house.client.post_command(request) == "c-1"
    (record,) = consumer.poll(10, 0.0)
    consumer.close()
    assert record.key == JOB
    assert CODEC.decode(record.headers, record.value) == Command(
        command_id="c-1", job=JOB, at=1100.0, verb="feedback", incident_id=INCIDENT, author="ada",
        feedback="true_positive", note="n",
    )  # fmt: skip


@pytest.mark.parametrize("verb", ["hold", "resume", "abort", "unexclude"])
def test_a_command_to_a_job_needs_no_incident(house: House, verb: str) -> None:
    consumer = house.bus.consumer(f"job-{verb}", ("commands",), start="latest")
    consumer.poll(10, 0.0)
    house.client.post_command(CommandRequest(verb=verb, job=JOB, author="ada", node="n0", note="why"))
    (record,) = consumer.poll(10, 0.0)
    consumer.close()
    sent = CODEC.decode(record.headers, record.value)
    assert (sent.verb, sent.job, sent.incident_id, sent.node, sent.author) == (verb, JOB, "", "n0", "ada")


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"incident_id": "nobody"}, 404, "no incident"),
        ({"job": "other"}, 422, "belongs to job"),
        ({"author": " "}, 422, "author"),
        ({"verb": "feedback"}, 422, "true_positive"),
        ({"verb": "approve"}, 422, "plan_hash"),
        ({"verb": "mute"}, 422, "until"),
        ({"verb": "mute", "until": 1000.0}, 422, "time to come"),
        ({"verb": "destroy"}, 422, "not a command"),
        ({"verb": "hold", "job": "nobody"}, 404, "no job"),
        ({"verb": "unexclude", "job": JOB}, 422, "node"),
        ({"unknown": 1}, 422, "unknown"),
        ({"note": "n" * 5_000}, 422, "shorten"),
        ({"note": "n" * 140_000}, 413, "at most"),
        ({"author": 7}, 422, "author"),
    ],
)
def test_a_wrong_command_never_reaches_the_bus(house: House, fields: dict, status: int, words: str) -> None:
    consumer = house.bus.consumer(f"refused-{words}-{status}-{len(str(fields))}", ("commands",), start="latest")
    consumer.poll(10, 0.0)
    given = {"verb": "acknowledge", "incident_id": INCIDENT, "author": "ada"} | fields
    answer = house.http.post("/v1/commands", content=msgspec.json.encode(given))
    assert (answer.status_code, words in answer.json()["error"]) == (status, True), answer.text
    assert consumer.poll(10, 0.0) == []
    consumer.close()


def test_a_command_that_the_bus_does_not_take_is_refused(house: House) -> None:
    class Away:
        def send(self, *_: object) -> None: ...

        def flush(self, timeout_seconds: float) -> None:
            raise BusUnavailable("the broker is away")

        def close(self) -> None: ...

    desk = CommandDesk(house.ledger.state, Away(), house.clock)
    with pytest.raises(LedgerUnavailable, match="the broker is away"):
        desk.post(CommandRequest(verb="acknowledge", incident_id=INCIDENT, author="ada"))


def test_tcp_needs_the_token_and_health_does_not(house: House) -> None:
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "s3cret"}):
        answer = httpx.get(f"{house.url}/v1/jobs", headers=headers)
        assert answer.status_code == 401
        assert "Bearer" in answer.json()["error"]
    assert httpx.get(f"{house.url}/healthz").status_code == 200
    with LedgerClient(house.url, "s3cret") as client:
        assert client.jobs() == house.reader.jobs()
    with LedgerClient(house.url, "wrong") as client, pytest.raises(LedgerUnavailable, match="token"):
        client.jobs()


def test_the_client_turns_refusals_into_errors_of_their_own(house: House) -> None:
    with pytest.raises(NotInLedger):
        house.client.incident("nobody/../else?x#y")
    with pytest.raises(BadQuestion):
        house.client.rows("verdicts", limit=5_000)
    with pytest.raises(BadQuestion):
        house.client.post_command(CommandRequest(verb="mute", incident_id=INCIDENT, author="ada"))


def test_ids_with_any_characters_can_be_asked_for(house: House) -> None:
    odd = f"{JOB}/1/2/a b?c#d%2Fe//ü"
    house.tell(verdict(9, verdict_id=odd))
    assert house.client.incident(odd).verdicts[0].verdict_id == odd


def test_nobody_there_is_a_sentence_that_names_the_command(tmp_path: Path) -> None:
    for address in (tmp_path / "no.sock", "http://127.0.0.1:9"):
        with LedgerClient(address) as client, pytest.raises(LedgerUnavailable, match="transom up") as caught:
            client.jobs()
        assert "\n" not in str(caught.value)


def test_a_closed_ledger_is_busy_not_broken(tmp_path: Path) -> None:
    house = House(tmp_path)
    try:
        house.tell(verdict(1))
        house.ledger.close()
        with pytest.raises(LedgerBusy, match="not open"):
            house.client.rows("verdicts")
        house.ledger.reopen()
        assert len(house.client.rows("verdicts").rows) == 1
    finally:
        house.close()


def test_many_readers_at_once_all_get_whole_answers(house: House) -> None:
    expected = house.reader.rows("verdicts", after=0)
    wrong: list[object] = []

    def ask(question: Callable[[LedgerClient], object], answer: object) -> None:
        with LedgerClient(house.socket_path) as client:
            wrong.extend(given for given in (question(client) for _ in range(10)) if given != answer)

    threads = [
        threading.Thread(target=ask, args=(lambda client: client.rows("verdicts", after=0), expected)) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_the_socket_is_its_owners_alone_and_a_stale_one_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "run" / "ledger.sock"
    first = unix_socket(path)
    first.close()
    assert path.exists()
    second = unix_socket(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    second.close()


def test_an_address_that_cannot_be_had_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CannotServe, match="not a socket"):
        unix_socket(tmp_path / "file")
    with pytest.raises(CannotServe, match="longer than 107 bytes"):
        unix_socket(tmp_path / ("x" * 120))
    with pytest.raises(CannotServe, match="cannot be made"):
        unix_socket(tmp_path / "file" / "s")
    taken = tcp_socket("127.0.0.1", 0)
    with pytest.raises(CannotServe, match="choose another port"):
        tcp_socket("127.0.0.1", taken.getsockname()[1])
    taken.close()
