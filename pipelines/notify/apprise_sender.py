"""Chat, mail, pagers and what else apprise knows, by addresses in a file of their own; apprise's one door."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

from pipelines.extras import missing_extra

from .notice import Level, Notice
from .sending import NotAnAddress, Undelivered

try:
    import apprise
except ImportError as error:  # pragma: no cover - only where the extra is missing
    raise missing_extra("apprise", "notify.apprise") from error

URLS_MAX = 20
FILE_BYTES_MAX = 64 * 1024
TRY_SECONDS_MAX = 30  # of one service; its connections have shorter time-outs of their own
KINDS: dict[Level, apprise.NotifyType] = {
    "info": apprise.NotifyType.INFO,
    "warning": apprise.NotifyType.WARNING,
    "page": apprise.NotifyType.FAILURE,
}

logging.getLogger("apprise").setLevel(logging.CRITICAL)  # addresses are secrets, and what receivers answer is theirs


class AppriseSender:
    """One address; `number` tells those of the same kind apart. Safe to send from one thread."""

    def __init__(self, url: str, number: int) -> None:
        """Raises NotAnAddress, which does not repeat it."""
        self.name = f"apprise {number}"
        # Nothing of ours is kept on disk, and no text of ours is a template.
        asset = apprise.AppriseAsset(app_id="transom", storage_mode="memory", service_timeout=TRY_SECONDS_MAX)
        self._service = apprise.Apprise(asset=asset)
        if not self._service.add(url):
            raise NotAnAddress(f"address {number} in notify.apprise.urls_file is none that apprise knows; correct it")

    def send(self, notice: Notice) -> None:
        kind = apprise.NotifyType.SUCCESS if notice.closed else KINDS[notice.level]
        taken = self._service.notify(title=notice.title, body=body_of(notice), notify_type=kind, body_format="text")
        if not taken:
            raise Undelivered("did not take it")  # apprise tells neither why nor whether another try may help


def body_of(notice: Notice) -> str:
    """The notice as people read it."""
    lines = [notice.text, notice.link]
    lines += [f"{notice.like_it} more like this one were not sent."] if notice.like_it else []
    lines += [f"{notice.lost_before} notices before this one did not arrive."] if notice.lost_before else []
    return "\n".join(lines)


def apprise_senders(file: Path) -> list[AppriseSender]:
    """One for each line of a file that nobody else can read; `#` begins a comment. Raises NotAnAddress."""
    try:
        with file.open("rb") as opened:
            mode = os.fstat(opened.fileno()).st_mode
            text = opened.read(FILE_BYTES_MAX).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotAnAddress(f"notify.apprise.urls_file: {file} cannot be read; give one address a line") from error
    if stat.S_IMODE(mode) & 0o077:
        raise NotAnAddress(f"notify.apprise.urls_file: others can read {file}; chmod 600 {file}")
    urls = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if not 0 < len(urls) <= URLS_MAX:
        raise NotAnAddress(f"notify.apprise.urls_file: {file} has {len(urls)} addresses; give 1 to {URLS_MAX}")
    return [AppriseSender(url, number) for number, url in enumerate(urls, 1)]
