"""How many labelled log cases get their class and action right, and how many benign lines speak: `evaluate logs`.

Names: classes are our symptoms one to one; where a file's author does not know one of ours that is finer, its coarser
name stands for it (`within` in detectors/diagnosis/symptoms.toml: `host_alloc` is a `host_oom`). Actions are named as
people name them (left) and as Transom does (right):

| in a file of cases       | of a diagnosis          |
| ------------------------ | ----------------------- |
| `none`                   | `none`                  |
| `restart_in_place`       | `restart_in_place`      |
| `restart_new_port`       | `restart_new_port`      |
| `restart_exclude_node`   | `restart_exclude_node`  |
| `rollback_checkpoint`    | `rollback_restart`      |
| `stop_notify`            | `stop`                  |
| `diagnose_then_restart`  | `diagnose_then_restart` |
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from detectors.diagnosis.diagnosis import Diagnoser, Diagnosis
from detectors.diagnosis.places import listen
from detectors.diagnosis.symptoms import Action, symptom_of, words
from detectors.logs.rule_book import RuleBook
from pipelines.figures import Figure

from .evaluation import CannotEvaluate, EvaluateOptions, Evaluation
from .log_cases import LogCase, read_cases

OWN_CASES = Path("data/logs/cases.jsonl")
ACTION_NAMES: dict[Action, str] = {"stop": "stop_notify", "rollback_restart": "rollback_checkpoint"}
ALSO_CALLED = {"stop": "stop_notify", "rollback_restart": "rollback_checkpoint", "notify": "none"}  # in a file of cases
NOTHING = frozenset(("none", "child_failed", "teardown", "advice"))  # what launchers print around a failure is no cause
ERROR_WORDS = re.compile(r"error|exception|failed", re.IGNORECASE)
CULPRIT_RANK = re.compile(r"\brank (\d+)\b", re.IGNORECASE)
CULPRIT_NOBODY = re.compile(r"^(?:none|unknown|workload|scheduler)\b", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Answer:
    """What a method says of a case: class and action in the names of the file; `rank` is -1 where it names nobody."""

    symptom: str
    action: str
    rank: int = -1
    summary: str = ""


Method = Callable[[Sequence[str]], Answer]


class Methods:
    """Transom's diagnosis, and what people do without it, over the same lines with the same rules."""

    def __init__(self) -> None:
        self.rules = RuleBook.shipped()

    def diagnosis(self, lines: Sequence[str]) -> Answer:
        """The case as if it were a file."""
        return answer_of(self.diagnose(lines))

    def diagnose(self, lines: Sequence[str]) -> Diagnosis:
        diagnoser = Diagnoser(self.rules)
        diagnoser.feed_lines("case.log", lines)
        return diagnoser.conclude()

    def first_error(self, lines: Sequence[str]) -> Answer:
        """The first line with a word of trouble in it."""
        return self._of_line(next((line for line in lines if ERROR_WORDS.search(line)), None))

    def last_error(self, lines: Sequence[str]) -> Answer:
        """The last line with a word of trouble in it."""
        return self._of_line(next((line for line in reversed(lines) if ERROR_WORDS.search(line)), None))

    def _of_line(self, line: str | None) -> Answer:
        """A line that is shown to a person counts as an alarm; the rule that matches it gives the class."""
        if line is None:
            return Answer("none", "none")
        hit = self.rules.match_line(listen(line).text)
        if hit is None:
            return Answer("unknown", "diagnose_then_restart")
        symptom = symptom_of(hit.rule)
        return Answer(symptom.name, ACTION_NAMES.get(symptom.action, symptom.action))


def answer_of(diagnosis: Diagnosis) -> Answer:
    """A diagnosis in the names of a file of cases."""
    if not diagnosis.found:
        return Answer("none", "none", summary=diagnosis.summary)
    action = ACTION_NAMES.get(diagnosis.action, diagnosis.action)
    return Answer(diagnosis.symptom, action, -1 if diagnosis.rank is None else diagnosis.rank, diagnosis.summary)


def names_of(symptom: str) -> frozenset[str]:
    """A symptom's own name and the coarser one; that nothing was found is right for what is only noise, too."""
    if symptom == "none":
        return NOTHING
    row = words().get(symptom)
    return frozenset((symptom,) if row is None or not row.within else (symptom, row.within))


@dataclass(frozen=True, slots=True)
class Score:
    """How a method did. `spoke`: benign lines, and benign cases as a whole, that it found a cause in."""

    name: str
    cases: int
    symptom: int
    action: int
    benign: int
    spoke: int
    misses: tuple[tuple[LogCase, Answer], ...]
    loud: tuple[str, ...]


def score(name: str, method: Method, cases: Sequence[LogCase]) -> Score:
    """Run every case through a method."""
    misses: list[tuple[LogCase, Answer]] = []
    loud: list[str] = []
    symptom = action = benign = 0
    labelled = [case for case in cases if not case.benign]
    for case in labelled:
        answer = method(case.lines)
        right = case.symptom in names_of(answer.symptom), answer.action == ALSO_CALLED.get(case.action, case.action)
        symptom, action = symptom + right[0], action + right[1]
        if not all(right):
            misses.append((case, answer))
    for case in cases:
        if not case.benign:
            continue
        said = [line for line in case.lines if line.strip()]
        benign += len(said) + 1
        loud += [line for line in said if method((line,)).symptom != "none"]
        if method(case.lines).symptom != "none":
            loud.append(f"all of {case.id} together")
    return Score(name, len(labelled), symptom, action, benign, len(loud), tuple(misses), tuple(loud))


def culprits(methods: Methods, cases: Sequence[LogCase]) -> tuple[int, int]:
    """Of the cases whose culprit is a rank, or is said to be nobody: how many are right, and how many there are."""
    right = asked = 0
    for case in cases:
        named = CULPRIT_RANK.search(case.culprit)
        if case.benign or (named is None and CULPRIT_NOBODY.match(case.culprit) is None):
            continue
        asked += 1
        found = methods.diagnose(case.lines)
        who = found.rank if found.rank is not None else found.local_rank
        wanted = int(named.group(1)) if named is not None else None
        right += who == wanted or (wanted is None and found.workload)
    return right, asked


def evaluate(path: Path | None, options: EvaluateOptions) -> Evaluation:
    """Run every case of `path` (Markdown or JSON lines; default: the cases in data/logs) through the diagnosis."""
    if path is None and not OWN_CASES.is_file():
        raise CannotEvaluate(
            f"name a file of log cases: transom evaluate logs PATH ({OWN_CASES} is not in this folder)"
        )
    cases = read_cases(path or OWN_CASES)
    methods = Methods()
    ours = score("transom diagnose", methods.diagnosis, cases)
    scores = [
        ours,
        score("first line /error|exception|failed/i", methods.first_error, cases),
        score("last such line", methods.last_error, cases),
    ]
    right, asked = culprits(methods, cases)
    figures = [
        Figure("logs.class", _share(ours.symptom, ours.cases), "ratio", n=ours.cases),
        Figure("logs.action", _share(ours.action, ours.cases), "ratio", n=ours.cases),
        Figure("logs.benign_false", ours.spoke, "lines", n=ours.benign),
    ]
    if asked:
        figures.append(Figure("logs.culprit", _share(right, asked), "ratio", n=asked))
    details = {
        "baselines": [
            {"name": o.name, "class": o.symptom, "action": o.action, "cases": o.cases, "benign_false": o.spoke}
            for o in scores[1:]
        ],
        "misses": [
            {"id": case.id, "class": case.symptom, "action": case.action, "said": [said.symptom, said.action]}
            for case, said in ours.misses
        ],
        "benign_false": list(ours.loud),
    }  # fmt: skip
    return Evaluation(tuple(figures), (_table(scores), *_misses(ours)), details)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 1.0


def _table(scores: Sequence[Score]) -> Table:
    table = Table(box=None, pad_edge=False)
    for heading in ("method", "class right", "action right", "benign lines that speak"):
        table.add_column(heading, justify="left" if heading == "method" else "right")
    for one in scores:
        table.add_row(
            escape(one.name),
            f"{one.symptom} of {one.cases}",
            f"{one.action} of {one.cases}",
            f"{one.spoke} of {one.benign}",
        )
    return table


def _misses(ours: Score) -> list[Table | str]:
    shown: list[Table | str] = []
    if ours.misses:
        table = Table(box=None, pad_edge=False, title="misses", title_justify="left")
        for heading in ("case", "asked", "said", "in a sentence"):
            table.add_column(heading, overflow="fold")
        for case, said in ours.misses:
            asked = f"{case.symptom} → {case.action}"
            table.add_row(
                escape(case.id), escape(asked), escape(f"{said.symptom} → {said.action}"), escape(said.summary)
            )
        shown.append(table)
    shown += [escape(f"speaks, and should not: {line}") for line in ours.loud]
    return shown
