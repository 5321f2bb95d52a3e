"""A real node exporter is scraped, and a real Prometheus over it is asked: both give numbers in our names."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pipelines.collect.prometheus import Prometheus, Scraped
from pipelines.collect.source import Measured, SourceFailed
from tests.embedded_chain import eventually


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


@pytest.fixture(scope="module")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """The exporter's and the server's."""
    folder = tmp_path_factory.mktemp("prometheus")
    exporter, server = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    scraped = f"- job_name: node\n  static_configs: [{{targets: ['{exporter}']}}]\n"
    (folder / "p.yml").write_text(f"global: {{scrape_interval: 1s}}\nscrape_configs:\n{scraped}")
    commands = [
        ["prometheus-node-exporter", f"--web.listen-address={exporter}"],
        ["prometheus", f"--web.listen-address={server}", f"--config.file={folder / 'p.yml'}",
         f"--storage.tsdb.path={folder / 'tsdb'}"],
    ]  # fmt: skip
    with ExitStack() as stack:
        for number, command in enumerate(commands):
            with (folder / f"{number}.log").open("wb") as log:
                process = subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
        eventually(lambda: answers(f"http://{exporter}/metrics") and answers(f"http://{server}/-/ready"), "both are up")
        yield f"http://{exporter}/metrics", f"http://{server}/api/v1/query"


def answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).status_code == 200
    except httpx.HTTPError:
        return False


def test_a_node_exporter_gives_memory_in_bytes_as_this_host_has_it(addresses: tuple[str, str]) -> None:
    source = Prometheus(Scraped(addresses[0]))
    (host,) = [one for one in source.read(5.0) if isinstance(one, Measured) and one.device == "host"]
    total = float(Path("/proc/meminfo").read_text().split()[1]) * 1024.0
    assert host.columns["system.memory.limit"] == total
    assert 0.0 < host.columns["system.memory.usage"] < total
    assert (host.at, host.whose.node) == (5.0, "")
    source.close()


def test_a_prometheus_server_is_asked_and_its_labels_name_the_node(addresses: tuple[str, str]) -> None:
    source = Prometheus(Scraped(addresses[1], query='{__name__=~"node_load1|node_memory_MemTotal_bytes"}'))
    (host,) = eventually(lambda: source.read(5.0), "a scraped sample")
    assert isinstance(host, Measured)
    assert host.whose.node == "127.0.0.1"
    assert host.columns["system.memory.limit"] > 2**28
    source.close()


def test_an_address_of_nobody_is_a_sentence_and_may_be_tried_again() -> None:
    source = Prometheus(Scraped("http://127.0.0.1:9/metrics"))
    with pytest.raises(SourceFailed, match="tried again"):
        source.read(0.0)
    source.close()
    with pytest.raises(SourceFailed, match="http://host:port/metrics"):
        Prometheus(Scraped("file:///etc/passwd"))
