"""The ring inside TLS: both ends show a certificate that one authority has signed, and prove the token inside."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from ckpt_engine.engine import Engine, EngineConfig
from ckpt_engine.errors import EngineRefused
from ckpt_engine.ring_config import RingTls
from tests.ckpt_lab import RawRank, eventually
from tests.machine import program
from tests.ring_lab import backed_up, kept, ring_config, ring_engine, ring_engines

PAYLOAD = bytes(range(256)) * 2000


def certificate(folder: Path, name: str) -> RingTls:
    """One that is its own authority."""
    files = RingTls(folder / f"{name}.pem", folder / f"{name}.key", folder / f"{name}.pem")
    curve = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2"]
    command = [program("openssl"), "req", "-x509", *curve, "-subj", f"/CN={name}"]
    subprocess.run([*command, "-out", files.certificate, "-keyout", files.key], check=True, capture_output=True)
    return files


def test_copies_go_round_inside_tls(tmp_path: Path) -> None:
    with ring_engines(tmp_path, "n0", "n1", tls=certificate(tmp_path, "ours")) as (first, second):
        with RawRank(first.socket) as rank:
            rank.save(7, PAYLOAD)
        assert backed_up(first, 0, 1, 7) == ""
        assert kept(second) == [("n0", 0, 7)]
        with RawRank(second.socket, attempt=2) as rank:
            answer = rank.load(7)
        assert (answer["tier"], answer["payload"]) == ("peer", PAYLOAD)


@pytest.mark.parametrize("theirs", [True, False])
def test_who_has_another_authority_or_none_stays_outside(tmp_path: Path, theirs: bool) -> None:
    ours = certificate(tmp_path, "ours")
    other = certificate(tmp_path, "other") if theirs else None
    with (
        ring_engine(tmp_path, "n0", "n0", "n1", tls=other, io_seconds_max=1.0) as first,
        ring_engine(tmp_path, "n1", "n0", "n1", tls=ours, io_seconds_max=1.0) as second,
    ):
        with RawRank(first.socket) as rank:
            rank.save(7, PAYLOAD)
        eventually(lambda: first.told("failed", 7, "peer"), "the refusal")
        assert kept(second) == []
        eventually(lambda: "could not prove" in second.admin.status().ring, "the count")


def test_files_that_cannot_be_read_are_said_at_the_start(tmp_path: Path) -> None:
    ring = ring_config("n0", "n1", tls=RingTls(tmp_path / "no", tmp_path / "no", tmp_path / "no"))
    with pytest.raises(EngineRefused, match="TLS files cannot be used"):
        Engine(EngineConfig("job", "n0", tmp_path / "n0.sock", tmp_path / "ck", ring=ring), lambda event: None)
