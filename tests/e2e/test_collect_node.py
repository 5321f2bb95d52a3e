"""`transom collect` beside a job of ours: a line of the real kernel log becomes the verdict of the job on its node."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from ingest.events import DeviceMetrics, Logs
from tests.embedded_chain import ENDLESS, Chain, embedded_chain, eventually


@pytest.fixture
def chain() -> Iterator[Chain]:
    with embedded_chain() as lab:
        yield lab


def test_an_xid_in_the_real_kernel_log_is_the_verdict_of_the_job_on_that_node(chain: Chain) -> None:
    chain.up()
    chain.run("xid", ENDLESS)
    chain.await_steps("xid", 1, 3)
    collector = chain.transom("collect", "--config", str(chain.config), "--node", "node0", "--kernel", "kmsg")
    eventually(
        lambda: [one for one in chain.messages(DeviceMetrics, job="xid") if one.collector == "collect/host"],
        "a sample of the host",
    )
    # From here on the kernel's own file is read from its end.
    with Path("/dev/kmsg").open("wb", buffering=0) as kernel:
        kernel.write(b"<3>NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, GPU has fallen off the bus.\n")
    (verdict,) = eventually(
        lambda: [one for one in chain.verdicts("xid") if one.fault_class == "gpu_lost"][:1], "a verdict"
    )
    assert verdict.culprits[0].node == "node0"
    assert any("Xid" in evidence.text for evidence in verdict.evidence)
    (line,) = [one for one in chain.messages(Logs, job="xid") if one.collector]
    assert (line.rank, line.node, line.lines[0].stream) == (-1, "node0", "kernel")
    assert collector.poll() is None
