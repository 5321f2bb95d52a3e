"""What comes of a start: it runs, it needs more nodes than there are, or it does not keep what it promised."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .backend import Observation
from .calls import Refused, Result, Seen, Short, Started, Starting
from .journal import Journal
from .nodes import adopt, release_words, usable_nodes
from .policy_config import PolicyConfig
from .store import RecoveryStore
from .store_schema import IncidentRow, IntentRow, Place

WAITS = "it had to wait for nodes"


@dataclass(frozen=True, slots=True)
class Launching:
    """Answers of the states `starting`, `waiting_capacity` and `probation`; inside a transaction of the caller."""

    store: RecoveryStore
    journal: Journal
    config: PolicyConfig

    def started(self, incident: IncidentRow, result: Result, now: float) -> None:
        if self.journal.overtaken(incident, result, now):
            return
        _, intent = self.journal.under_way(incident)
        assert intent.next_attempt is not None
        if isinstance(result, Refused):
            self.journal.hold(incident, "start_rejected", f"the start was refused: {result.text}", now)
        elif isinstance(result, Short):
            self._short(incident, intent, result, now)
        elif isinstance(result, Starting):
            waited, note = now - incident.entered_at, result.observation.note
            if waited > self.config.starting_seconds_max:
                why = f"attempt {intent.next_attempt} has not come up in {waited:.0f} s" + (f": {note}" if note else "")
                self.journal.hold(incident, "start_rejected", why, now)
            # else it is asked again, with the same attempt and token
        else:
            assert isinstance(result, Started)
            self._runs(incident, intent, result.observation, now)

    def _runs(self, incident: IncidentRow, intent: IntentRow, observation: Observation, now: float) -> None:
        store = self.store
        places = tuple(Place(rank.rank, rank.node) for rank in observation.ranks)
        nodes = len({place.node for place in places})
        row = next(one for one in store.attempts(incident.job) if one.attempt == intent.next_attempt)
        store.save_attempt(replace(row, started_at=now, places=places, nodes=nodes))
        store.save_intent(replace(intent, phase="started"))
        store.exclusions_told(incident.job, intent.excluded, intent.released)
        wanted = observation.nodes_wanted if intent.nodes else 0
        store.save_job(replace(store.job(incident.job), nodes_wanted=wanted))
        fewer = f" on {nodes} of {wanted} nodes, until there are more" if wanted else ""
        text = f"attempt {intent.next_attempt} was started{fewer}" + (f"; {intent.note}" if intent.note else "")
        self.journal.receipt(incident, "done", text, now, intent.next_attempt)
        store.move(incident, "started", text, now)
        assert intent.next_attempt is not None
        self.journal.attempt_runs(incident.job, intent.next_attempt, now, but=incident.incident_id)

    def _short(self, incident: IncidentRow, intent: IntentRow, short: Short, now: float) -> None:
        """Too few nodes: on fewer where the job may, else wait. What was not started is charged to nobody."""
        store = self.store
        row = next(one for one in store.attempts(incident.job) if one.attempt == intent.next_attempt)
        store.save_attempt(replace(row, budget="planned", cause=""))
        if short.least and short.least <= short.usable < (intent.nodes or short.wanted):
            store.save_intent(replace(intent, phase="stopped", nodes=short.usable, note=intent.note))
            cause = f"{short.text}; it may run on {short.least} and starts on {short.usable}"
            store.move(incident, "smaller", cause, now)
            return
        why = f"{short.text}; looking again every {self.config.capacity_seconds:.0f} s"
        note = intent.note
        if WAITS not in note:  # people are told once, however often it is tried
            note = f"{note}; {WAITS}" if note else WAITS
            self.journal.receipt(incident, "waiting", f"{why}; {release_words(store, incident.job, now)}", now)
        store.save_intent(replace(intent, phase="stopped", nodes=None, note=note))
        store.move(incident, "short", why, now, due_at=now + self.config.capacity_retry_seconds)

    def waited(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Waiting for capacity: enough nodes, an exclusion that has ended, or time for another try."""
        if self.journal.overtaken(incident, result, now):
            return
        if isinstance(result, Refused):
            self.journal.close(incident, "attempt_over", f"the job is gone: {result.text}", now)
            return
        assert isinstance(result, Seen)
        observation, (_, intent) = result.observation, self.journal.under_way(incident)
        adopt(self.store, observation, now)
        excluded = self.store.excluded(incident.job, now)
        usable = usable_nodes(observation, excluded)
        needed = observation.nodes_min or observation.nodes_wanted
        back = sorted(set(intent.excluded) - set(excluded))
        if needed and usable >= needed:
            cause = f"{usable} nodes can be used, {needed} are needed"
        elif back:
            cause = f"{', '.join(back)} may be used again"
        elif now >= incident.due_at:
            cause = f"trying again after {now - incident.entered_at:.0f} s"
        else:
            return
        self.store.save_intent(replace(intent, excluded=excluded))
        self.store.move(incident, "capacity", cause, now)

    def watched(self, incident: IncidentRow, result: Result, now: float) -> None:
        """Probation: steady after enough steps and enough time; a failure is told by a verdict, not by us."""
        _, intent = self.journal.under_way(incident)
        assert intent.next_attempt is not None
        if isinstance(result, Refused):
            self.journal.close(incident, "attempt_over", f"the job is gone: {result.text}", now)
            return
        assert isinstance(result, Seen)
        observation, waited = result.observation, now - incident.entered_at
        if observation.phase == "finished" or observation.ended:
            self.journal.job_over(incident.job, observation.phase, "", now)
            return
        if observation.attempt > intent.next_attempt:
            self.journal.close(incident, "attempt_over", f"attempt {observation.attempt} was started", now)
            return
        self._check_resumed(incident, intent, observation, now)
        config, job, resumed = self.config, self.store.job(incident.job), intent.resume_step or 0
        if observation.step >= resumed + config.probation_steps:
            if waited >= config.probation_seconds:
                furthest = max(job.furthest_step, observation.step)
                cause = f"step {observation.step}, resumed from {resumed}; furthest so far {furthest}"
                self.journal.close(incident, "steady", cause, now)
        elif waited > config.probation_seconds_max and observation.step < 0:
            self.journal.close(incident, "steady", f"runs for {waited:.0f} s; it reports no steps", now)
        elif waited > config.probation_seconds_max:
            cause = f"step {observation.step} after {waited:.0f} s, resumed from {resumed}"
            self.journal.close(incident, "stuck", cause, now)

    def _check_resumed(self, incident: IncidentRow, intent: IntentRow, observation: Observation, now: float) -> None:
        """Does it train from where it was told to? A script that ignores the step begins anew, and hours are lost."""
        asked = intent.resume_step
        if asked is None or not 0 <= observation.step < asked or "does not load" in intent.note:
            return
        note = (
            f"attempt {intent.next_attempt} was to resume from step {asked} and is at step {observation.step}: "
            "the script does not load what transom.init().resume_step says, or counts its steps anew"
        )
        self.store.save_intent(replace(intent, note=note))
        self.journal.receipt(incident, "failed", note, now, intent.next_attempt)
