"""How engines find each other: a file each, and life is a counter that goes on."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from ckpt_engine.ring_members import FOLDER, Member, Members, decode_member, is_node_name


class Still:
    """A clock that is moved by hand."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def monotonic(self) -> float:
        return self.at


class Town:
    """Several engines' views of one folder, on one clock."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.clock = Still()

    def view(self, *nodes: str, addresses: dict[str, tuple[str, int]] | None = None) -> Members:
        return Members(self.folder, nodes, addresses or {}, self.clock, beat_seconds=1.0, dead_seconds=5.0)

    def wait(self, seconds: float) -> None:
        self.clock.at += seconds


@pytest.fixture
def town(tmp_path: Path) -> Town:
    return Town(tmp_path)


def me(node: str, epoch: str = "e1", port: int = 7000) -> Member:
    return Member(node, "10.0.0.1", port, epoch)


def test_what_one_publishes_the_others_read(town: Town) -> None:
    ours, theirs = town.view(), town.view()
    ours.publish(me("n0"))
    found = theirs.living("n0")
    assert found == Member("n0", "10.0.0.1", 7000, "e1", 1)
    file = town.folder / FOLDER / "n0.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700
    assert [path.name for path in file.parent.iterdir()] == ["n0.json"]


def test_a_counter_that_stands_still_is_a_dead_engine_and_one_that_goes_on_a_living_one(town: Town) -> None:
    ours, theirs = town.view(), town.view()
    ours.publish(me("n0"))
    assert theirs.living("n0") is not None
    town.wait(4.0)
    assert theirs.living("n0") is not None
    town.wait(2.0)
    assert theirs.living("n0") is None
    ours.publish(me("n0"))
    town.wait(1.0)
    assert theirs.living("n0") is not None
    town.wait(1000.0)
    ours.publish(me("n0"))
    assert theirs.living("n0") is not None, "nobody looked meanwhile, but it went on"


def test_a_new_start_is_a_new_epoch(town: Town) -> None:
    theirs = town.view()
    town.view().publish(me("n0", "e1"))
    first = theirs.living("n0")
    town.wait(9.0)
    town.view().publish(me("n0", "e2", 7001))
    second = theirs.living("n0")
    assert first is not None
    assert second is not None
    assert (first.epoch, second.epoch, second.port) == ("e1", "e2", 7001)


def test_who_leaves_is_gone_at_once(town: Town) -> None:
    ours, theirs = town.view(), town.view()
    ours.publish(me("n0"))
    assert theirs.living("n0") is not None
    ours.withdraw("n0")
    ours.withdraw("n0")
    town.wait(1.0)
    assert theirs.living("n0") is None


def test_the_order_is_the_jobs_and_strangers_come_last_by_name(town: Town) -> None:
    for node in ("spare", "extra", "n0"):
        town.view().publish(me(node))
    assert town.view("n1", "n0", addresses={"far": ("10.0.0.9", 1)}).order() == ("n1", "n0", "far", "extra", "spare")


def test_a_given_address_needs_no_file_and_a_file_is_over_it(town: Town) -> None:
    members = town.view(addresses={"far": ("10.0.0.9", 7)})
    assert members.living("far") == Member("far", "10.0.0.9", 7, "")
    town.view().publish(me("far"))
    town.wait(1.0)
    assert members.living("far") == Member("far", "10.0.0.1", 7000, "e1", 1)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{", b"[]", b"7", b"{}", b"\xff\xfe", b'{"node":"n0"}', b"[" * 100_000,
        b'{"node":"../x","host":"h","port":1,"epoch":"e","beat":1}',
        b'{"node":"n0","host":"h","port":70000,"epoch":"e","beat":1}',
        b'{"node":"n0","host":"h","port":true,"epoch":"e","beat":1}',
        b'{"node":"n0","host":"","port":1,"epoch":"e","beat":1}',
        b'{"node":"n0","host":"h","port":1,"epoch":"e","beat":-1}',
        b'{"node":"n0","host":"h","port":1,"epoch":["e"],"beat":1}',
    ],
)  # fmt: skip
def test_a_file_that_is_no_member_is_nobody(town: Town, raw: bytes) -> None:
    assert decode_member(raw) is None
    folder = town.folder / FOLDER
    folder.mkdir()
    (folder / "n0.json").write_bytes(raw)
    assert town.view("n0").living("n0") is None


def test_a_file_under_another_name_is_nobody(town: Town) -> None:
    town.view().publish(me("n1"))
    (town.folder / FOLDER / "n1.json").rename(town.folder / FOLDER / "n0.json")
    assert town.view().living("n0") is None


@pytest.mark.parametrize("name", ["", "..", "../n0", "a/b", ".n0", "-n0", "n0\n", "n\0", "x" * 129])
def test_a_name_that_is_no_file_name_is_none(town: Town, name: str) -> None:
    assert not is_node_name(name)
    assert town.view(name).living(name) is None
