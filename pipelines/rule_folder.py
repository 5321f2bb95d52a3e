"""The log rules that stand: ours, and those of the user's folder, read again when it changes."""

from __future__ import annotations

from pathlib import Path

from detectors.logs.rule_book import RuleBook, RuleError
from pipelines.errors import StatedError


class BadRules(StatedError):
    """The user's log rules cannot be used; the text names file and rule and says what to change."""


def rules_for(folder: Path | None) -> RuleBook:
    """Ours and the folder's. Raises BadRules."""
    try:
        return RuleBook.load_with(folder)
    except RuleError as error:
        raise BadRules(f"the log rules in {folder} cannot be used: {error}") from error


class RuleFolder:
    """Watches the folder by the names, times and sizes of its files; a bad rule never takes the good ones away."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._seen = self._look()
        self.trouble = ""  # one sentence on why the folder's rules are not in use
        try:
            self.book = rules_for(folder)
        except BadRules as error:
            self.book = RuleBook.shipped()
            self.trouble = f"{error}; detection goes on with the shipped rules"

    def changed(self) -> RuleBook | None:
        """The new book where the folder has changed and every rule in it is good; else None, and `trouble` says why."""
        if self._folder is None:
            return None
        seen = self._look()
        if seen == self._seen:
            return None
        self._seen = seen
        try:
            self.book = rules_for(self._folder)
        except BadRules as error:
            self.trouble = f"{error}; detection goes on with the rules it has"
            return None
        self.trouble = ""
        return self.book

    def _look(self) -> tuple[tuple[str, int, int], ...]:
        """What tells one state of the folder from another; empty where it cannot be read."""
        if self._folder is None:
            return ()
        found = []
        try:
            for path in sorted(self._folder.glob("*.toml")):
                stat = path.stat()
                found.append((path.name, stat.st_mtime_ns, stat.st_size))
        except OSError:
            return ()
        return tuple(found)
