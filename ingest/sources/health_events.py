"""What others say about a node's health, as lines that detection reads: NVSentinel, gpud, and Slurm's drain reasons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from datetime import datetime
from typing import Any

import msgspec

from ingest.sources.kernel_log import KernelLine

TEXT_CHARS_MAX = 1_000
EVENTS_MAX = 1_000  # of one answer
_XID = re.compile(r"(?:\bxid\D{0,3}|^)(\d{1,3})$", re.IGNORECASE)
_PCI = re.compile(r"\b(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-7])?\b")
_DRAINED = ("DRAIN", "DOWN", "FAIL")


class Impacted(msgspec.Struct, kw_only=True, rename="camel"):
    """Which part of a node an event of NVSentinel is about."""

    entity_type: str = ""
    entity_value: str = ""


class HealthEvent(msgspec.Struct, kw_only=True, rename="camel"):
    """NVSentinel's HealthEvent in protobuf's JSON form (its data_models/protobufs/health_event.proto)."""

    agent: str = ""
    component_class: str = ""
    check_name: str = ""
    is_fatal: bool = False
    is_healthy: bool = False
    message: str = ""
    recommended_action: str | int = ""
    error_code: tuple[str, ...] | str = ()
    entities_impacted: tuple[Impacted, ...] = ()
    node_name: str = ""
    generated_timestamp: str = ""


class GpudState(msgspec.Struct, kw_only=True):
    """One state of a component of gpud's `/v1/states`."""

    time: str = ""
    name: str = ""
    health: str = ""
    reason: str = ""
    error: str = ""


class GpudComponent(msgspec.Struct, kw_only=True):
    """One component of gpud's `/v1/states`."""

    component: str
    states: tuple[GpudState, ...] = ()


class NotHealth(ValueError):
    """These bytes are none of the known shapes; one sentence."""


def read_health(body: bytes, now: float) -> list[KernelLine]:
    """The unhealthy among what gpud's `/v1/states` answers, or one event of NVSentinel. Raises NotHealth."""
    try:
        decoded: Any = msgspec.json.decode(body)
        if isinstance(decoded, list):
            return from_gpud(msgspec.convert(decoded[:EVENTS_MAX], list[GpudComponent]), now)
        if isinstance(decoded, dict) and "healthevent" in decoded:  # as its change stream wraps it
            decoded = decoded["healthevent"]
        if not isinstance(decoded, dict) or not {"checkName", "isHealthy", "nodeName"} & decoded.keys():
            raise NotHealth("this is neither gpud's list of components nor a health event of NVSentinel")
        return from_nvsentinel(msgspec.convert(decoded, HealthEvent), now)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeDecodeError, RecursionError) as error:
        raise NotHealth(f"this is no health event ({error})") from error


def from_nvsentinel(event: HealthEvent, now: float) -> list[KernelLine]:
    """An unhealthy event as one line; one with an Xid in the driver's own words, so that the rules of Xids hold."""
    if event.is_healthy:
        return []
    codes = (event.error_code,) if isinstance(event.error_code, str) else event.error_code
    gpu = next((one.entity_value for one in event.entities_impacted if one.entity_type.upper() in ("PCI", "GPU")), "")
    at = _seconds(event.generated_timestamp, now)
    told = [_xid_line(code, gpu, f"{event.check_name} {event.message}") for code in codes]
    lines = [text for text in told if text]
    if not lines:
        fatal = "fatal" if event.is_fatal else "not fatal"
        lines = [f"nvsentinel: {event.check_name or event.component_class} unhealthy ({fatal}): {event.message}"]
    return [KernelLine(at, text[:TEXT_CHARS_MAX], host=event.node_name) for text in lines]


def from_gpud(components: Sequence[GpudComponent], now: float) -> list[KernelLine]:
    """Each unhealthy or degraded state as one line."""
    lines = []
    for component in components:
        for state in component.states:
            if state.health.lower() not in ("unhealthy", "degraded"):
                continue
            reason = state.reason or state.error
            text = f"gpud: {component.component} {state.health.lower()}: {reason}"
            if "xid" in component.component.lower():
                found = re.search(r"\bxid\D{0,10}(\d{1,3})\b", reason, re.IGNORECASE)
                text = _xid_line(found[1], reason, reason) or text if found is not None else text
            lines.append(KernelLine(_seconds(state.time, now), text[:TEXT_CHARS_MAX]))
    return lines


def from_scontrol(text: str, now: float) -> KernelLine | None:
    """`scontrol show node -o NODE` as one line where the node is drained, down or failing; None where it is not."""
    state = re.search(r"\bState=(\S+)", text)
    name = re.search(r"\bNodeName=(\S+)", text)
    if state is None or name is None or not any(word in state[1].upper() for word in _DRAINED):
        return None
    reason = re.search(r"\bReason=(.*?)(?: \[([^\]@]*)@([^\]]*)\])?\s*(?:$|\s\w+=)", text)
    why, who = (reason[1].strip(), reason[2] or "") if reason is not None else ("no reason is given", "")
    at = _seconds(reason[3], now) if reason is not None and reason[3] else now
    by = f" (by {who})" if who else ""
    return KernelLine(at, f"slurm: node {name[1]} is {state[1]}: {why}{by}"[:TEXT_CHARS_MAX])


def _xid_line(code: str, device: str, more: str) -> str:
    found = _XID.search(code.strip())
    if found is None:
        return ""
    pci = _PCI.search(device)
    return f"NVRM: Xid (PCI:{pci[0] if pci else '0000:00:00'}): {found[1]}, {more}".rstrip()


def _seconds(text: str, now: float) -> float:
    """RFC 3339 as UTC seconds, at most now; now where it is none, or says no zone."""
    try:
        moment = datetime.fromisoformat(text.replace("Z", "+00:00"))
    except ValueError:
        return now
    return min(now, moment.timestamp()) if moment.tzinfo is not None else now
