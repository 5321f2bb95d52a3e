"""The controller: takes verdicts and commands in durably, drives every incident, never waits for a backend.

    accept* → (commit the offset) → tick: answers of calls → new entries → incidents' next calls → looks → outbox

`tick` is called often and returns at once; calls run in `workers`, one per job at a time. All state that
matters is in the store, so a new life needs nothing but the file: `reconcile` says what it found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

from detectors.verdict import Verdict

from .action import Command
from .backend import Backend, CheckpointCatalog
from .calls import OlderAlive, Result, Starting, Unanswered, guarded, reject_checkpoints
from .incident import ACTING, DRIVEN, SAFE_TO_HOLD, WAITS_LONG, Event
from .journal import Journal
from .lease import ControllerLease, OwnHost
from .orders import Orders
from .plan import Plan
from .policy import retry_seconds
from .policy_config import PolicyConfig
from .routing import BATCH_MAX, Router
from .steps import Steps
from .store import RecoveryStore, Waiting
from .store_schema import IncidentRow, Rejection
from .watch import Jobs, Watch, Watched
from .workers import Workers

UNANSWERED_TO_TELL = 2  # a single lost answer is nobody's concern
STARTING_POLL_SECONDS = 0.2  # while a scheduler or launchers bring an attempt up


class Controller:
    """See the module. One thread calls everything here; `random` jitters waits and makes tokens.

    `jobs`: those to look at without a verdict; `lease`: who may act, where controllers of several hosts might.
    """

    def __init__(
        self,
        store: RecoveryStore,
        backend: Backend,
        catalog: CheckpointCatalog,
        config: PolicyConfig,
        random: Random,
        workers: Workers[Result],
        *,
        jobs: Jobs = tuple,
        lease: ControllerLease | None = None,
    ) -> None:
        self._store = store
        self._catalog = catalog
        self._config = config
        self._random = random
        self._workers = workers
        self._lease = lease or OwnHost(store.epoch)
        self._router = Router(store, config)
        journal = Journal(store, self._router)
        self._steps = Steps(store, backend, catalog, config, random, journal)
        self._orders = Orders(store, self._router, journal, self._steps.decisions)
        self._watch = Watch(store, backend, catalog, journal, self._steps.exits, config, jobs)
        self._asked: dict[str, IncidentRow | Rejection | Watched] = {}  # by job: whom the call that is out belongs to
        self._unanswered: dict[str, int] = {}  # by incident: calls in a row without an answer
        self._not_before: dict[str, float] = {}  # by incident: when it may ask again
        self._reminded: dict[str, float] = {}  # by incident: when people were told again, in this life

    # in

    def accept(self, verdict: Verdict, now: float) -> bool:
        """Take a verdict in; on return it is on disk. False: a redelivery, which is counted."""
        return self.accept_all((verdict,), now) == 1

    def accept_all(self, verdicts: Iterable[Verdict], now: float) -> int:
        """The same for a batch in one commit; how many were new. Commit the offsets after this returns."""
        with self._store.transaction():
            return sum(self._store.insert_verdict(verdict, now) for verdict in verdicts)

    def accept_command(self, command: Command, now: float) -> bool:
        """Take a command in; on return it is on disk. False: a redelivery."""
        with self._store.transaction():
            return self._store.insert_command(command, now)

    # out

    def pending_messages(self, limit: int = 500) -> list[Waiting]:
        """Actions, receipts, incidents and verdicts of our own that nobody has published yet, in order."""
        return self._store.waiting(limit)

    def mark_published(self, seqs: Sequence[int]) -> None:
        """Call it only after the bus has flushed these: a crash may publish again, never not at all."""
        if seqs:
            self._store.mark_published(seqs)

    # on

    def reconcile(self) -> list[IncidentRow]:
        """What an earlier life left unfinished; `tick` goes on with it, and looks before it acts."""
        return self._store.unfinished(states=DRIVEN)

    def tick(self, now: float) -> None:
        """One round; never blocks, never raises for what a backend does. StoreError: stop at once.

        Without the lease nothing is decided and nobody is asked; what comes in is kept for whoever has it next.
        """
        if not self._lease.is_ours():
            return
        with self._store.together():
            self._take_answers(now)
            self._file_new(now)
            unfinished = self._store.unfinished(states=DRIVEN | WAITS_LONG)
            driven = [incident for incident in unfinished if incident.state in DRIVEN]
            # A job has one call out at a time, and whoever does something to it goes before who only watches it.
            driven.sort(key=lambda one: one.state == "probation")
            asking = [after for incident in driven if (after := self._drive(incident, now)) is not None]
            for incident in unfinished:
                self._remind(incident, now)
            waiting = {incident.incident_id for incident in unfinished}
            self._reminded = {name: at for name, at in self._reminded.items() if name in waiting}
        for incident in asking:  # all of it is on disk now
            self._ask(incident, now)
        for rejection in self._store.open_rejections():
            self._reject(rejection, now)
        acted_on = {incident.job for incident in driven if incident.state in ACTING}
        for job in self._watch.due(now):
            if job in acted_on or self._workers.busy(job):
                continue
            if self._workers.submit(job, guarded(self._watch.call(job, now), self._lease)):
                self._asked[job] = Watched(job)

    def idle(self) -> bool:
        """Nothing to do before the next verdict, command, look, or the end of a wait."""
        return not self._asked and not self._store.unfinished(states=DRIVEN)

    def wait(self, seconds: float) -> bool:
        """Wait for the answer of a call, at most this long: a loop with nothing else to do sleeps here."""
        return self._workers.wait(seconds)

    def explain(self, incident_id: str, now: float) -> Plan | None:
        """What the policy says about an incident as its verdicts stand, without asking the backend."""
        incident = self._store.incident(incident_id)
        return self._steps.decisions.plan(incident, None, now) if incident is not None else None

    def _file_new(self, now: float) -> None:
        entries = self._store.new_verdicts(BATCH_MAX)
        commands = self._store.new_commands(BATCH_MAX)
        if not entries and not commands:
            return
        with self._store.transaction():
            for entry in entries:
                self._router.file(entry, now)
            for seq, command in commands:
                self._orders.obey(seq, command, now)

    def _drive(self, incident: IncidentRow, now: float) -> IncidentRow | None:
        """Let time do what it does to this incident; as it is then, where its state asks something of the backend."""
        if incident.state in SAFE_TO_HOLD:
            held = self._store.job(incident.job).held
            plan = incident.plan
            approved = plan is not None and plan.plan_hash != "" and incident.approved_hash == plan.plan_hash
            if held and not approved:  # whoever approved this very plan has said more than to hold
                self._move(incident, "hold", f"{held}; `transom resume` goes on", now)
                return None
        if incident.state == "coalescing":
            if now < incident.due_at or self._router.must_wait(incident):
                return None
            incident = self._move(incident, "settled", "no more evidence is awaited", now)
        if incident.state == "awaiting_approval":
            if now >= incident.due_at:
                self._move(incident, "timed_out", "nobody approved in time", now)
            return None
        if incident.state == "checking" and now >= incident.due_at:
            with self._store.transaction():
                incident = self._steps.unchecked(incident, now)
        if incident.state == "backing_off":
            if now < incident.due_at:
                return None
            incident = self._move(incident, "due", "the wait is over", now)
        if incident.state == "deciding" and self._decide_now(incident, now):
            return None
        return incident

    def _ask(self, incident: IncidentRow, now: float) -> None:
        """The call of its state, unless one of its job is out or it is too early."""
        if now < self._not_before.get(incident.incident_id, 0.0) or self._workers.busy(incident.job):
            return
        if self._workers.submit(incident.job, guarded(self._steps.call(incident), self._lease)):
            self._asked[incident.job] = incident
            if incident.state == "probation":
                self._not_before[incident.incident_id] = now + self._config.probation_poll_seconds

    def _remind(self, incident: IncidentRow, now: float) -> None:
        """People are told again of what waits for them, or for nodes, and has waited long."""
        told_at = max(self._reminded.get(incident.incident_id, 0.0), incident.entered_at)
        if incident.state not in WAITS_LONG or now - told_at < self._config.held_again_seconds:
            return
        now_is = self._store.incident(incident.incident_id)
        if now_is is None or now_is.state != incident.state:
            return  # this very round has moved it on
        self._reminded[incident.incident_id] = now
        words = f"{incident.state.replace('_', ' ')} for {(now - incident.entered_at) / 3600:.1f} h"
        with self._store.transaction():
            self._store.move(incident, "reminded", words, now, due_at=incident.due_at)

    def _decide_now(self, incident: IncidentRow, now: float) -> bool:
        with self._store.transaction():
            return self._steps.decisions.decide_now(incident, now)

    def _move(self, incident: IncidentRow, event: Event, cause: str, now: float) -> IncidentRow:
        with self._store.transaction():
            return self._store.move(incident, event, cause, now)

    def _reject(self, rejection: Rejection, now: float) -> None:
        key = f"{rejection.job}/{rejection.verdict_id}"
        if now < self._not_before.get(key, 0.0) or self._workers.busy(rejection.job):
            return
        catalog = self._catalog
        call = guarded(lambda: reject_checkpoints(catalog, rejection), self._lease)
        if self._workers.submit(rejection.job, call):
            self._asked[rejection.job] = rejection

    def _take_answers(self, now: float) -> None:
        for job, result in self._workers.take():
            asked = self._asked.pop(job)
            if isinstance(asked, Watched):
                with self._store.transaction():
                    self._watch.seen(job, result, now)
                continue
            if isinstance(asked, Rejection):
                self._rejected(asked, result, now)
                continue
            incident = self._store.incident(asked.incident_id)
            assert incident is not None
            with self._store.transaction():
                self._watch.heard(job, result, now)
            if incident.state != asked.state:
                continue  # it has moved on meanwhile, and asks for itself
            if isinstance(result, Unanswered):
                self._wait_for(incident, result.text, now)
                continue
            self._unanswered.pop(incident.incident_id, None)
            with self._store.transaction():
                self._steps.answer(incident, result, now)
                if incident.state == "probation":
                    self._watch.overheard(job, result, now)
            self._pace(incident, result, now)

    def _pace(self, before: IncidentRow, result: Result, now: float) -> None:
        """A state that asks again because the answer was "not yet" asks after a while, not in a busy loop."""
        after = self._store.incident(before.incident_id)
        assert after is not None
        if before.state == "probation":
            return
        self._not_before.pop(before.incident_id, None)
        if isinstance(result, Starting):
            self._not_before[before.incident_id] = now + STARTING_POLL_SECONDS
        elif after.state == "waiting_capacity":
            self._not_before[before.incident_id] = now + self._config.capacity_seconds
        elif after.state == before.state or isinstance(result, OlderAlive):
            self._not_before[before.incident_id] = now + retry_seconds(1, self._config, self._random.random())

    def _wait_for(self, incident: IncidentRow, text: str, now: float) -> None:
        """No answer: ask again later, tell people once, conclude nothing."""
        tries = self._unanswered.get(incident.incident_id, 0) + 1
        self._unanswered[incident.incident_id] = tries
        delay = retry_seconds(tries, self._config, self._random.random())
        self._not_before[incident.incident_id] = now + delay
        if tries == UNANSWERED_TO_TELL:
            with self._store.transaction():
                self._steps.unanswered(incident, text, now)

    def _rejected(self, rejection: Rejection, result: Result, now: float) -> None:
        key = f"{rejection.job}/{rejection.verdict_id}"
        if isinstance(result, Unanswered):
            tries = self._unanswered.get(key, 0) + 1
            self._unanswered[key] = tries
            self._not_before[key] = now + retry_seconds(tries, self._config, self._random.random())
            return
        self._unanswered.pop(key, None)
        self._not_before.pop(key, None)
        with self._store.transaction():
            self._store.rejection_done(rejection)
