"""Commands of people: checked against what the ledger knows, durable on the bus before the answer."""

from __future__ import annotations

import math
import threading
import uuid
from collections.abc import Callable

from ingest.bus import BusError, Producer
from ingest.clock import Clock
from ingest.codec import Codec
from recovery.action import JOB_VERBS, RECOVERY_TYPES, Command

from .shapes import BadQuestion, CommandRequest, LedgerUnavailable, NotInLedger
from .state import LedgerState

TEXT_CHARACTERS_MAX = 4_000
FLUSH_SECONDS = 5.0


def _random_id() -> str:
    return uuid.uuid4().hex


class CommandDesk:
    """Takes commands from any thread and puts them on the bus."""

    def __init__(
        self, state: LedgerState, producer: Producer, clock: Clock, new_id: Callable[[], str] = _random_id
    ) -> None:
        self._state = state
        self._producer = producer
        self._clock = clock
        self._new_id = new_id
        self._codec = Codec(RECOVERY_TYPES)
        self._lock = threading.Lock()

    def post(self, request: CommandRequest) -> str:
        """The command's id, durable. Raises BadQuestion, NotInLedger, LedgerUnavailable."""
        command = self._command(request)
        encoded = self._codec.encode(command)
        with self._lock:
            try:
                self._producer.send(encoded.topic, encoded.key, encoded.headers, encoded.value)
                self._producer.flush(FLUSH_SECONDS)
            except BusError as error:
                raise LedgerUnavailable(
                    f"the command may not have reached the bus, look before giving it again: {error}"
                ) from error
        return command.command_id

    def _job_of(self, request: CommandRequest, now: float) -> str:
        """Whose job it is about. Raises NotInLedger, BadQuestion."""
        if request.verb in JOB_VERBS:
            if request.job not in {job.job for job in self._state.jobs(now)}:
                raise NotInLedger(f"there is no job {request.job!r} in the ledger; `transom incidents` names jobs")
            if request.verb == "unexclude" and not request.node:
                raise BadQuestion("node is empty; unexclude needs the node that may be used again")
            return request.job
        incident = self._state.incident(request.incident_id)
        if incident is None:
            raise NotInLedger(
                f"there is no incident {request.incident_id!r} among the recent ones; `transom incidents` lists them"
            )
        if request.job and request.job != incident.job:
            raise BadQuestion(f"incident {request.incident_id!r} belongs to job {incident.job!r}, not {request.job!r}")
        return incident.job

    def _command(self, request: CommandRequest) -> Command:
        now = self._clock.now()
        job = self._job_of(request, now)
        if not request.author.strip():
            raise BadQuestion("author is empty; say who gives this command")
        if max(map(len, (request.author, request.note, request.plan_hash, request.node))) > TEXT_CHARACTERS_MAX:
            raise BadQuestion(f"a text of this command is longer than {TEXT_CHARACTERS_MAX} characters; shorten it")
        if request.verb == "feedback" and not request.feedback:
            raise BadQuestion("feedback is empty; give true_positive, false_positive or unknown")
        if request.verb in ("approve", "reject") and not request.plan_hash:
            raise BadQuestion(f"plan_hash is empty; {request.verb} needs the plan_hash of the action that was shown")
        if request.verb == "mute" and request.until is None:
            raise BadQuestion("until is empty; say until when (UTC seconds) the incident is muted")
        if request.until is not None and not (math.isfinite(request.until) and request.until > now):
            raise BadQuestion(f"until is {request.until!r}, which is not a time to come (UTC seconds)")
        return Command(
            command_id=self._new_id(),
            job=job,
            at=now,
            verb=request.verb,
            incident_id=request.incident_id,
            author=request.author.strip(),
            plan_hash=request.plan_hash,
            feedback=request.feedback,
            note=request.note,
            until=request.until,
            node=request.node,
        )
