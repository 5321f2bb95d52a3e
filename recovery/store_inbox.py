"""What came in: verdicts and commands, each once, each with what became of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from detectors.verdict import Verdict

from .action import Command
from .store_file import StoreFile

_encode = msgspec.json.Encoder().encode
_decode_verdict = msgspec.json.Decoder(Verdict).decode
_decode_command = msgspec.json.Decoder(Command).decode


class Entry(NamedTuple):
    """A verdict in the inbox that nobody has looked at yet."""

    seq: int
    verdict: Verdict


class Inbox(StoreFile):
    """Verdicts by id and revision, commands by id. What is filed is written at the end of its transaction."""

    _filed: list[tuple[str, str | None, int]]  # outcome, incident, seq
    _incident_of: dict[str, str]  # by verdict, of those
    _filed_in: dict[str, list[Verdict]]  # by incident, of those

    def _forget(self) -> None:
        super()._forget()
        self._filed, self._incident_of, self._filed_in = [], {}, {}

    def _flush(self) -> None:
        if self._filed:
            rows, self._filed = self._filed, []
            self._incident_of.clear()
            self._filed_in.clear()
            self._write_all("UPDATE inbox SET outcome=?, incident_id=? WHERE seq=?", rows)
        super()._flush()

    def insert_verdict(self, verdict: Verdict, now: float) -> bool:
        """True if this revision is new; a redelivery is counted and nothing else."""
        values = (verdict.verdict_id, verdict.revision, verdict.job, verdict.attempt, _encode(verdict), now)
        columns = "verdict_id, revision, job, attempt, body, accepted_at"
        done = self._write(f"INSERT OR IGNORE INTO inbox ({columns}) VALUES (?,?,?,?,?,?)", *values)
        if done.rowcount:
            return True
        self._write("UPDATE inbox SET duplicates = duplicates + 1 WHERE verdict_id=? AND revision=?", *values[:2])
        return False

    def insert_filed(self, verdict: Verdict, incident_id: str, outcome: str, now: float) -> None:
        """A verdict of our own, which belongs to its incident from the beginning; it comes back over the bus."""
        if self.insert_verdict(verdict, now):
            where = "verdict_id=? AND revision=?"
            identity = (verdict.verdict_id, verdict.revision)
            self._write(f"UPDATE inbox SET outcome=?, incident_id=? WHERE {where}", outcome, incident_id, *identity)

    def new_verdicts(self, limit: int) -> list[Entry]:
        """Those that nobody has looked at: the oldest of each job, then the second of each; in order within a job."""
        rows = self._all(
            "SELECT inbox.seq, body FROM inbox JOIN "
            "(SELECT seq, ROW_NUMBER() OVER (PARTITION BY job ORDER BY seq) AS turn FROM inbox WHERE outcome = '') "
            "AS queued ON inbox.seq = queued.seq ORDER BY turn, inbox.seq LIMIT ?",
            limit,
        )
        return [Entry(seq, _decode_verdict(body)) for seq, body in rows]

    def file_verdict(self, entry: Entry, outcome: str, incident_id: str) -> None:
        """Say what became of an inbox entry; it is not looked at again, except as part of its incident."""
        assert outcome
        assert self._in_transaction
        self._filed.append((outcome, incident_id, entry.seq))
        self._incident_of[entry.verdict.verdict_id] = incident_id
        self._filed_in.setdefault(incident_id, []).append(entry.verdict)

    def outcomes(self) -> list[tuple[str, int, str, int]]:
        """(verdict_id, revision, outcome, duplicates) of the whole inbox, oldest first."""
        return self._all("SELECT verdict_id, revision, outcome, duplicates FROM inbox ORDER BY seq")

    def incident_of_verdict(self, verdict_id: str) -> str | None:
        """The incident that an earlier revision of this verdict belongs to."""
        known = self._incident_of.get(verdict_id)
        if known is not None:
            return known
        row = self._one(
            "SELECT incident_id FROM inbox WHERE verdict_id=? AND incident_id IS NOT NULL LIMIT 1", verdict_id
        )
        return row[0] if row else None

    def told_in(self, incident_id: str) -> Iterator[Verdict]:
        """Every revision of an incident's verdicts, oldest first, decoded as far as somebody asks for them."""
        rows = self._connection.execute("SELECT body FROM inbox WHERE incident_id=? ORDER BY seq", (incident_id,))
        for (body,) in rows:
            yield _decode_verdict(body)
        yield from self._filed_in.get(incident_id, ())

    def verdicts_of(self, incident_id: str) -> list[Verdict]:
        """The newest revision of each verdict of an incident, in the order they first came."""
        newest: dict[str, Verdict] = {}
        for verdict in self.told_in(incident_id):
            known = newest.get(verdict.verdict_id)
            if known is None or verdict.revision > known.revision:
                newest[verdict.verdict_id] = verdict
        return list(newest.values())

    def insert_command(self, command: Command, now: float) -> bool:
        columns = "command_id, body, accepted_at"
        values = (command.command_id, _encode(command), now)
        return bool(self._write(f"INSERT OR IGNORE INTO commands ({columns}) VALUES (?,?,?)", *values).rowcount)

    def new_commands(self, limit: int) -> list[tuple[int, Command]]:
        rows = self._all("SELECT seq, body FROM commands WHERE outcome = '' ORDER BY seq LIMIT ?", limit)
        return [(seq, _decode_command(body)) for seq, body in rows]

    def file_command(self, seq: int, outcome: str) -> None:
        self._write("UPDATE commands SET outcome=? WHERE seq=?", outcome, seq)

    def command_outcomes(self) -> list[tuple[Command, str]]:
        """Every command and what became of it, oldest first."""
        rows = self._all("SELECT body, outcome FROM commands ORDER BY seq")
        return [(_decode_command(body), outcome) for body, outcome in rows]
