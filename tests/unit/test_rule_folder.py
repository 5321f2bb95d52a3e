"""A site's own log rules: changed, switched off and added beside ours, read again when they change."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from detectors.config import DetectorConfig
from detectors.ensemble.config import EnsembleConfig
from detectors.job_detector import JobDetector
from detectors.logs.rule_book import RuleBook, RuleError
from ingest.clock import ManualClock
from ingest.events import LogLine, Logs
from ingest.memory_bus import MemoryBus
from pipelines.detect import RULES_SECONDS, Detect
from pipelines.places import Places
from pipelines.rule_folder import BadRules, RuleFolder, rules_for
from pipelines.settings import load_settings

OWN = """
[[rule]]
id = "{id}"
class = "warning"
role = "root"
advice = "none"
severity = "warning"
pattern = '{pattern}'
gate = ["fan tray"]
source = "our racks"
must_match = ["fan tray 3 has failed"]
must_not_match = ["fan tray 3 is fine"]
"""
FAN = OWN.format(id="fan", pattern="fan tray .* failed")
FULL = "OSError: [Errno 28] No space left on device"


def write(folder: Path, text: str, name: str = "own.toml") -> None:
    path = folder / name
    path.write_text(text)
    os.utime(path, ns=(path.stat().st_mtime_ns, path.stat().st_mtime_ns + 1_000_000_000 * (len(text) + 1)))


def test_a_new_rule_speaks_before_ours(tmp_path: Path) -> None:
    write(tmp_path, FAN)
    book = RuleBook.load_with(tmp_path)
    hit = book.match_line("fan tray 3 has failed: No space left on device")
    assert hit is not None
    assert hit.rule.id == "fan"
    assert book.match_line(FULL).rule.id == "disk_full"


def test_a_rule_of_ours_is_changed_field_by_field_or_switched_off(tmp_path: Path) -> None:
    write(tmp_path, '[[rule]]\nid = "disk_full"\nadvice = "notify"\n[[rule]]\nid = "import"\nenabled = false\n')
    book = RuleBook.load_with(tmp_path)
    hit = book.match_line(FULL)
    assert hit is not None
    assert (hit.rule.fault_class, hit.rule.advice) == ("disk_full", "notify")
    assert book.match_line("ImportError: no apex").rule.id != "import"
    assert len(book.rules) == len(RuleBook.shipped().rules)


def test_an_xid_is_ignored_where_a_site_wants_that(tmp_path: Path) -> None:
    write(tmp_path, "[[xid]]\ncode = 31\nenabled = false\n[[xid]]\ncode = 63\nclass = 'gpu_ecc'\n")
    book = RuleBook.load_with(tmp_path)
    assert book.match_line("NVRM: Xid (PCI:0000:3b:00): 31, pid=1") is None
    assert book.match_line("NVRM: Xid (PCI:0000:3b:00): 63, pid=1").rule.fault_class == "gpu_ecc"
    assert RuleBook.shipped().match_line("NVRM: Xid (PCI:0000:3b:00): 31, pid=1") is not None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (OWN.format(id="fan", pattern="fan ("), "rule fan: the pattern is not a regular expression"),
        (OWN.format(id="fan", pattern="fan tray"), "rule fan matches its near miss"),
        (OWN.format(id="fan", pattern="turbine"), "rule fan does not match its own line"),
        (OWN.format(id="fan", pattern=".*"), "rule fan: the pattern matches an empty line"),
        (FAN.replace('"fan tray"]', '"Fan"]'), "rule fan: the pieces of a gate are lower case"),
        (FAN.replace('gate = ["fan tray"]', 'gate = ["turbine"]'), "no piece of its gate is in its own line"),
        (FAN.replace('"warning"\nrole', '"catastrophe"\nrole'), "catastrophe"),
        ('[[rule]]\nid = "nobody"\nadvice = "none"\n', "nobody"),
        ("[[rule]]\nadvice = 'none'\n", "has no id"),
        ("[[rules]]\nid = 'a'\n", "it has 'rules'"),
        ("rule = 3\n", "before each entry"),
        ("[[xid]]\nadvice = 'none'\n", "needs code"),
        ("not toml", "own.toml is not a file of log rules"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(tmp_path: Path, text: str, reason: str) -> None:
    write(tmp_path, text)
    with pytest.raises(RuleError) as caught:
        RuleBook.load_with(tmp_path)
    assert reason in str(caught.value)
    with pytest.raises(BadRules, match=r"^the log rules in .* cannot be used: "):
        rules_for(tmp_path)


def test_a_folder_that_is_not_there_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadRules, match="cannot be read"):
        rules_for(tmp_path / "nowhere")


def test_the_folder_is_read_again_when_it_changes_and_a_bad_rule_takes_nothing_away(tmp_path: Path) -> None:
    watched = RuleFolder(tmp_path)
    assert watched.changed() is None
    write(tmp_path, FAN)
    book = watched.changed()
    assert book is not None
    assert "fan" in book.by_id
    assert watched.changed() is None
    write(tmp_path, FAN + "nonsense")
    assert watched.changed() is None
    assert "fan" in watched.book.by_id
    assert "detection goes on with the rules it has" in watched.trouble
    write(tmp_path, "")
    assert watched.changed() is not None
    assert watched.trouble == ""


def test_a_folder_that_is_bad_from_the_start_leaves_the_shipped_rules(tmp_path: Path) -> None:
    write(tmp_path, "nonsense")
    watched = RuleFolder(tmp_path)
    assert len(watched.book.rules) == len(RuleBook.shipped().rules)
    assert "goes on with the shipped rules" in watched.trouble
    assert RuleFolder(None).changed() is None


def test_other_rules_hold_from_the_next_tick_on(tmp_path: Path) -> None:
    write(tmp_path, FAN)
    detector = JobDetector("j", DetectorConfig(ensemble=EnsembleConfig(on=False)), RuleBook.shipped())

    def say(at: float) -> list[str]:
        line = LogLine(at=at, stream="kernel", text="fan tray 3 has failed")
        detector.observe(Logs(job="j", attempt=1, rank=-1, node="n", sequence=int(at * 10), at=at, lines=(line,)))
        return [verdict.detector for verdict in detector.advance(at + 1.0)]

    assert say(1.0) == []
    detector.use_rules(RuleBook.load_with(tmp_path))
    detector.observe(
        Logs(
            job="j",
            attempt=1,
            rank=-1,
            node="n",
            sequence=15,
            at=2.1,
            lines=(LogLine(at=2.1, stream="kernel", text="fan tray 1 has failed"),),
        )
    )
    assert detector.advance(2.2) == []  # no tick since: the old rules have read it
    assert say(3.0) == ["rules/fan"]


def test_the_service_takes_changed_rules_over_and_says_why_it_keeps_the_old(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "rules"
    folder.mkdir()
    places = Places(tmp_path / "state", tmp_path / "run")
    chosen = {"ensemble": False, "rules_dir": folder}
    settings = load_settings(overrides={"state_dir": places.state, "detect": chosen})
    clock = ManualClock(1_000.0)
    bus = MemoryBus(clock=clock)
    bus.create_topics(1)
    service = Detect(settings, places, bus, clock)

    def after(text: str) -> list[str]:
        write(folder, text)
        service._look_at_rules()  # too soon: the folder is looked at every two seconds
        told = capfd.readouterr()
        assert "rules" not in told.out + told.err
        clock.advance(RULES_SECONDS)
        service._look_at_rules()
        told = capfd.readouterr()
        return [line for line in (told.out + told.err).splitlines() if "rules" in line]

    clock.advance(RULES_SECONDS)
    service._look_at_rules()
    capfd.readouterr()
    assert "are in use from now on" in after(FAN)[0]
    assert "fan" in service._detection._rules.by_id
    assert "detection goes on with the rules it has" in after(FAN + "nonsense")[0]
    assert "fan" in service._detection._rules.by_id
