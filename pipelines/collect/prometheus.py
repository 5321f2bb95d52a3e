"""Exporters and a Prometheus server as sources: text is scraped, or a query asked, and mapped to our names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import httpx

from ingest.sources.exposition import DeviceSample, NotExposition, parse_exposition, parse_query
from pipelines.collect.source import SEEN_MAX, Measured, Seen, SourceFailed, Whose

BODY_BYTES_MAX = 32 * 1024 * 1024
SECONDS_MAX = 5.0
NODE_LABELS = ("Hostname", "node", "nodename", "kubernetes_node", "instance")


@dataclass(frozen=True, slots=True)
class Scraped:
    """An address, and whose samples it gives. With `query` it is a Prometheus server, else an exporter's /metrics."""

    url: str
    node: str = ""  # empty: this node, or as a label of the samples says
    job: str = ""
    query: str = ""
    token_file: Path | None = None
    seconds: float = 5.0


class Prometheus:
    """One address; each read is one scrape. DCGM's `gpu` and `pci_bus_id` labels say which rank's GPU it is."""

    def __init__(self, scraped: Scraped, transport: httpx.BaseTransport | None = None) -> None:
        self.name = f"prometheus {scraped.url}"
        self.every_seconds = scraped.seconds
        self._scraped = scraped
        self._too_many = 0
        parts = urlsplit(scraped.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise SourceFailed(f"collect.prometheus has the address {scraped.url!r}; give http://host:port/metrics")
        self._client = httpx.Client(timeout=SECONDS_MAX, transport=transport, follow_redirects=False, trust_env=False)

    def read(self, now: float) -> Sequence[Seen]:
        body = self._body()
        try:
            samples = parse_query(body) if self._scraped.query else parse_exposition(body.decode("utf-8"))
        except (NotExposition, UnicodeDecodeError) as error:
            raise SourceFailed(f"{self._scraped.url}: {error}") from error
        return self._measured(samples, now)

    def stored(self) -> None:
        """A scrape has no place to remember."""

    def counters(self) -> Mapping[str, int]:
        return {"samples_beyond_limit": self._too_many} if self._too_many else {}

    def close(self) -> None:
        self._client.close()

    def _body(self) -> bytes:
        scraped = self._scraped
        headers = {"accept": "text/plain;version=0.0.4", "accept-encoding": "identity"}
        try:
            if scraped.token_file is not None:
                headers["authorization"] = f"Bearer {scraped.token_file.read_text(encoding='utf-8').strip()}"
            parameters = {"query": scraped.query} if scraped.query else None
            with self._client.stream("GET", scraped.url, headers=headers, params=parameters) as answer:
                body = b""
                for chunk in answer.iter_bytes():
                    body += chunk
                    if len(body) > BODY_BYTES_MAX:
                        raise SourceFailed(f"{scraped.url} gives more than {BODY_BYTES_MAX} bytes; narrow it")
                if answer.status_code != 200 and not scraped.query:
                    raise SourceFailed(f"{scraped.url} answers {answer.status_code}; check the address and the token")
                return body
        except (httpx.HTTPError, OSError) as error:
            reason = str(error) or type(error).__name__
            raise SourceFailed(f"{scraped.url} cannot be read ({reason}); it is tried again") from error

    def _measured(self, samples: Sequence[DeviceSample], now: float) -> list[Seen]:
        columns: dict[tuple[str, str, str], dict[str, float]] = {}
        for sample in samples:
            node = self._scraped.node or (_node_of(sample.labels) if self._scraped.query else "")
            pci = sample.labels.get("pci_bus_id") or sample.labels.get("pci_bus") or ""
            columns.setdefault((node, sample.device, pci), {})[sample.name] = sample.value
        self._too_many += max(0, len(columns) - SEEN_MAX)
        return [
            Measured(device, now, _completed(values), self._whose(node, device, pci))
            for (node, device, pci), values in list(columns.items())[:SEEN_MAX]
        ]

    def _whose(self, node: str, device: str, pci: str) -> Whose:
        """A GPU is a rank's: by its address where that is told, else by its number, as local ranks are counted."""
        number = device.removeprefix("gpu:")
        local = int(number) if device.startswith("gpu:") and number.isdecimal() and not pci else None
        return Whose(node=node, job=self._scraped.job, local_rank=local, pci_address=pci)


def _node_of(labels: Mapping[str, str]) -> str:
    found = next((labels[label] for label in NODE_LABELS if labels.get(label)), "")
    return found.partition(":")[0]


def _completed(values: Mapping[str, float]) -> dict[str, float]:
    """What detection reads and exporters give in other parts: memory in use, and a GPU's whole memory."""
    whole = dict(values)
    available = whole.pop("system.memory.available", None)
    if available is not None and "system.memory.limit" in whole:
        whole["system.memory.usage"] = whole["system.memory.limit"] - available
    free = whole.pop("hw.gpu.memory.free", None)
    if free is not None and "hw.gpu.memory.usage" in whole:
        whole.setdefault("hw.gpu.memory.limit", whole["hw.gpu.memory.usage"] + free)
    return whole
