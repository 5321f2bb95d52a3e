"""Settings: flags over environment over file, and one sentence for whatever is wrong."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pipelines.settings import Settings, SettingsError, load_settings


def write(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "transom.toml"
    file.write_text(text, encoding="utf-8")
    return file


def test_flags_are_over_environment_over_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write(tmp_path, '[bus]\nkind = "kafka"\nprefix = "file"\nbootstrap_servers = "file:9092"\n')
    monkeypatch.setenv("TRANSOM_BUS__PREFIX", "environment")
    monkeypatch.setenv("TRANSOM_BUS__BOOTSTRAP_SERVERS", "environment:9092")
    bus = load_settings(file, {"bus": {"prefix": "flag"}}).bus
    assert (bus.kind, bus.bootstrap_servers, bus.prefix) == ("kafka", "environment:9092", "flag")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[bus]\nkindd = 'kafka'\n", "unknown setting 'bus.kindd'.*known here: bootstrap_servers, kind"),
        ("colour = 1\n", "unknown setting 'colour'.*known here: bus, checkpoint"),
        ("[bus]\npartitions = 'many'\n", "'bus.partitions'.*is 'many'.*integer"),
        ("[recover.modes]\nhang = 'sometimes'\n", "'recover.modes.hang'.*'observe', 'approve' or 'auto'"),
        ("[bus\n", "is not TOML"),
    ],
)
def test_a_wrong_setting_is_one_sentence(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(SettingsError, match=said) as caught:
        load_settings(write(tmp_path, text))
    assert "\n" not in str(caught.value)


def test_an_unknown_key_in_the_environment_is_an_error_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRANSOM_BUS__KINDD", "kafka")
    with pytest.raises(SettingsError, match=r"unknown setting 'bus\.kindd'"):
        load_settings(write(tmp_path, ""))


def test_a_settings_file_that_was_named_must_exist(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="there is no settings file"):
        load_settings(tmp_path / "absent.toml")


def test_a_state_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SettingsError, match=r"state folder .* cannot be written .*set state_dir"):
        Settings(state_dir=tmp_path / "file" / "below").make_state_dir()


def test_sockets_of_a_deep_state_folder_lie_where_the_kernel_takes_them(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    folder = Settings(state_dir=deep).socket_folder()
    assert len(os.fsencode(folder)) < 70
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.rmdir()


def test_a_socket_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path / "s")
    settings.socket_folder().chmod(0o755)
    with pytest.raises(SettingsError, match="open to others"):
        settings.socket_folder()
