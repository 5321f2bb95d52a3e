"""The ring as settings ask for it: on with a token, off with a sentence, and nothing half."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelines.errors import StatedError
from pipelines.ring import OFF_ALONE, OFF_WITHOUT_TOKEN, ring_of
from pipelines.settings import RING_TOKEN_VARIABLE, Settings, load_settings

NODES = ("node0", "node1")
TOKEN = "0123456789abcdef0123"


@pytest.fixture(autouse=True)
def _no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(RING_TOKEN_VARIABLE, raising=False)


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    return file


def settings(**ring: Any) -> Settings:
    return load_settings(None, {"checkpoint": {"ring": ring}})


def test_without_a_token_it_is_off_and_says_how_to_turn_it_on() -> None:
    assert ring_of(settings(), NODES) == (None, OFF_WITHOUT_TOKEN)
    assert "checkpoint.ring.token_file" in OFF_WITHOUT_TOKEN


def test_a_single_node_has_no_ring(token_file: Path) -> None:
    assert ring_of(settings(token_file=token_file), NODES[:1]) == (None, OFF_ALONE)


def test_with_a_token_it_is_on_for_this_machine_alone(token_file: Path) -> None:
    config, why = ring_of(settings(token_file=token_file), NODES)
    assert config is not None
    assert (config.token, config.nodes, config.listen_host, why) == (TOKEN.encode(), NODES, "127.0.0.1", "")
    assert TOKEN not in repr(config)


def test_the_environment_may_carry_the_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(RING_TOKEN_VARIABLE, TOKEN)
    config, _ = ring_of(settings(), NODES)
    assert config is not None
    assert config.token == TOKEN.encode()


def test_all_that_is_set_arrives(token_file: Path, tmp_path: Path) -> None:
    pem = {name: tmp_path / name for name in ("tls_certificate", "tls_key", "tls_authority")}
    config, _ = ring_of(
        settings(
            token_file=token_file, listen="0.0.0.0", port=7000, advertise="10.0.0.1", replication=2,
            peer_memory_bytes_max=5, bytes_per_second_max=6, groups={"node0": "a"},
            addresses={"far": "[fe80::1]:70"}, **pem,
        ),
        NODES,
    )  # fmt: skip
    assert config is not None
    assert (config.listen_port, config.reached_by, config.replication) == (7000, "10.0.0.1", 2)
    assert (config.memory_bytes_max, config.bytes_per_second_max) == (5, 6)
    assert config.addresses == {"far": ("fe80::1", 70)}
    assert config.tls is not None
    assert config.tls.key == pem["tls_key"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"listen": "0.0.0.0"}, "advertise_host"),
        ({"addresses": {"far": "nowhere"}}, "not host:port"),
        ({"addresses": {"../far": "h:1"}}, "cannot be the name"),
        ({"tls_key": "key.pem"}, "given together"),
    ],
)
def test_what_cannot_be_is_refused(token_file: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(StatedError, match=said):
        ring_of(settings(token_file=token_file, **options), NODES)


@pytest.mark.parametrize("mode", [0o644, 0o640])
def test_a_token_file_that_others_can_read_is_refused(token_file: Path, mode: int) -> None:
    token_file.chmod(mode)
    with pytest.raises(StatedError, match="chmod 600"):
        ring_of(settings(token_file=token_file), NODES)


def test_a_token_that_is_too_short_is_refused(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token_file.write_text("short")
    with pytest.raises(StatedError, match="at least 16"):
        ring_of(settings(token_file=token_file), NODES)
    monkeypatch.setenv(RING_TOKEN_VARIABLE, "short")
    with pytest.raises(StatedError, match="at least 16"):
        ring_of(settings(), NODES)
