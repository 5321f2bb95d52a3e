"""One pre-flight check, in a process of its own on the node that it is about; prints what came of it as JSON.

Forked from the zygote, so that torch costs nothing: a script that imports nothing of ours. What torch the zygote has
not imported is not used. argv[1] is the order as JSON, see `recovery/launcher/checks.py`.

    matmul      seconds of a fixed multiplication on each device, its result checked (Freivalds' algorithm)
    disk        write, fsync, read back in the checkpoint folder
    gpu_memory  wait until the old attempt's memory is free
    network     a block of bytes to the first of the group and back, over plain TCP
    all_reduce  a sum over the group, NCCL where there are GPUs, else gloo
"""

from __future__ import annotations

import json
import os
import socket
import struct
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

ROUNDS = 3
MATMUL_CPU = 1024  # rows and columns, float32; 20 to 60 ms on one core
MATMUL_GPU = 4096
MATMUL_PLAIN = 48  # without torch: lists of Python floats
TOLERANCE = 1e-3  # of the result's largest value: float32, and TF32 where it is on
DISK_BYTES = 4 << 20
BLOCK_BYTES = 256 << 10
REDUCE_VALUES = 256 << 10
FREE_SHARE_MIN = 0.9  # of a GPU's memory
WAIT_SECONDS = 0.05
INNER_SHARE = 0.9  # of the time that the launcher gives: who gives up first can say why


class Failed(Exception):
    """The check has found something; the text is one sentence."""


class Skipped(Exception):
    """It cannot be done here."""


def pause(seconds: float) -> None:
    time.sleep(seconds)  # noqa: TID251 - this script imports nothing of ours


def torch_here() -> Any:
    """torch, where the zygote has imported it."""
    return sys.modules.get("torch")


def devices_here() -> list[str]:
    torch = torch_here()
    if torch is None:
        return []
    if torch.cuda.is_available():
        return [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    return ["cpu"]


def matmul(order: dict[str, Any]) -> tuple[float, str]:
    """The shortest of some rounds on the slowest device. Raises Failed for a wrong result."""
    devices = devices_here()
    if not devices:
        return plain_matmul(), ""
    took = {device: device_matmul(device) for device in devices}
    slowest = max(took, key=lambda device: took[device])
    return took[slowest], slowest if len(took) > 1 else ""


def device_matmul(device: str) -> float:
    torch = torch_here()
    size = MATMUL_CPU if device == "cpu" else MATMUL_GPU
    torch.manual_seed(0)
    left, right = (torch.rand(size, size, device=device) for _ in range(2))
    probe = torch.rand(size, 1, device=device)
    product, times = left @ right, []
    for _ in range(ROUNDS):
        settle(device)
        began = time.perf_counter()
        product = left @ right
        settle(device)
        times.append(time.perf_counter() - began)
    if not bool(torch.isfinite(product).all()):
        raise Failed(f"a multiplication on {device} gives values that are not finite")
    expected = left @ (right @ probe)
    error = float(((product @ probe) - expected).abs().max() / expected.abs().max())
    if error > TOLERANCE:
        raise Failed(f"a multiplication on {device} is wrong by {error:.1e} of its value")
    return min(times)


def settle(device: str) -> None:
    if device != "cpu":
        torch_here().cuda.synchronize(device)


def plain_matmul() -> float:
    """The same for a job without torch: Python's own numbers."""
    size, times = MATMUL_PLAIN, []
    left = [[float((row * 7 + column) % 11) for column in range(size)] for row in range(size)]
    for _ in range(ROUNDS):
        began = time.perf_counter()
        columns = list(zip(*left, strict=True))
        product = [[sum(a * b for a, b in zip(row, column, strict=True)) for column in columns] for row in left]
        times.append(time.perf_counter() - began)
    sums = [sum(row) for row in left]
    expected = [sum(a * b for a, b in zip(row, sums, strict=True)) for row in left]
    if [sum(row) for row in product] != expected:
        raise Failed("a multiplication on this node's processor is wrong")
    return min(times)


def disk(order: dict[str, Any]) -> tuple[float, str]:
    if not order["folder"]:
        raise Skipped("this job has no checkpoint folder")
    folder = Path(order["folder"])
    if not folder.is_dir():
        raise Skipped("the checkpoint folder does not exist yet")
    path = folder / f".preflight-{os.getpid()}"
    content, began = os.urandom(DISK_BYTES), time.perf_counter()
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            with os.fdopen(descriptor, "r+b", buffering=0) as file:
                left = memoryview(content)
                while left:
                    left = left[file.write(left) :]
                os.fsync(file.fileno())
                with suppress(OSError):  # not every file system forgets on request
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
                file.seek(0)
                if b"".join(iter(lambda: file.read(1 << 20), b"")) != content:
                    raise Failed("what was written to the checkpoint folder reads back differently")
        finally:
            path.unlink(missing_ok=True)
    except OSError as error:
        raise Failed(f"the checkpoint folder cannot be written ({error.strerror})") from error
    return time.perf_counter() - began, ""


def gpu_memory(order: dict[str, Any]) -> tuple[float, str]:
    devices = [device for device in devices_here() if device != "cpu"]
    if not devices:
        raise Skipped("there is no GPU here")
    torch = torch_here()
    return await_memory(devices, lambda device: torch.cuda.mem_get_info(device), order["seconds"] * INNER_SHARE)


def await_memory(
    devices: list[str], free_and_total: Callable[[str], tuple[int, int]], seconds: float
) -> tuple[float, str]:
    """Wait until nearly all memory of each device is free; `free_and_total` in bytes. Raises Failed."""
    began = time.perf_counter()
    while True:
        told = {device: free_and_total(device) for device in devices}
        full = [device for device, (free, total) in told.items() if free < FREE_SHARE_MIN * total]
        took = time.perf_counter() - began
        if not full:
            return took, ""
        if took >= seconds:
            free, total = told[full[0]]
            used, all_ = (total - free) / 2**30, total / 2**30
            raise Failed(f"{used:.1f} of {all_:.1f} GiB of {full[0]} are still in use")
        pause(WAIT_SECONDS)


def network(order: dict[str, Any]) -> tuple[float, str]:
    """The first of the group answers each of the others with what it was sent."""
    deadline = time.perf_counter() + order["seconds"] * INNER_SHARE
    began = time.perf_counter()
    try:
        if order["rank"] == 0:
            serve_blocks(order["port"], order["world"] - 1, deadline)
        else:
            send_block(order["host"], order["port"], deadline)
    except OSError as error:
        raise Failed(f"{order['host']}, port {order['port']}: {error.strerror or 'no answer in time'}") from error
    return time.perf_counter() - began, ""


def serve_blocks(port: int, callers: int, deadline: float) -> None:
    family = socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET
    dual = family == socket.AF_INET6
    with socket.create_server(("", port), family=family, backlog=max(callers, 1), dualstack_ipv6=dual) as listener:
        served = 0
        while served < callers:
            listener.settimeout(max(0.001, deadline - time.perf_counter()))
            try:
                peer, _ = listener.accept()
            except TimeoutError:
                raise Failed(f"{served} of {callers} others came to this node in time") from None
            with peer:
                peer.settimeout(max(0.001, deadline - time.perf_counter()))
                block = receive(peer)
                peer.sendall(struct.pack(">I", len(block)) + block)
                served += 1


def send_block(host: str, port: int, deadline: float) -> None:
    block = os.urandom(BLOCK_BYTES)
    while True:
        try:
            peer = socket.create_connection((host, port), max(0.001, deadline - time.perf_counter()))
            break
        except OSError:  # the first of the group may not listen yet
            if time.perf_counter() + WAIT_SECONDS >= deadline:
                raise
            pause(WAIT_SECONDS)
    with peer:
        peer.settimeout(max(0.001, deadline - time.perf_counter()))
        peer.sendall(struct.pack(">I", len(block)) + block)
        if receive(peer) != block:
            raise Failed(f"{host} answers with other bytes than it was sent")


def receive(peer: socket.socket) -> bytes:
    def exactly(size: int) -> bytes:
        content = bytearray()
        while len(content) < size:
            chunk = peer.recv(min(size - len(content), 1 << 16))
            if not chunk:
                raise Failed("another node closed the connection")
            content += chunk
        return bytes(content)

    (size,) = struct.unpack(">I", exactly(4))
    if size > BLOCK_BYTES:
        raise Failed("somebody else talks on the port of this check")
    return exactly(size)


def all_reduce(order: dict[str, Any]) -> tuple[float, str]:
    torch = torch_here()
    if torch is None or not torch.distributed.is_available():
        raise Skipped("torch is not loaded here")
    dist, seconds = torch.distributed, timedelta(seconds=order["seconds"] * INNER_SHARE)
    rank, world = order["rank"], order["world"]
    gpus = [device for device in devices_here() if device != "cpu"]
    kind = "nccl" if gpus and dist.is_nccl_available() else "gloo"
    began = time.perf_counter()
    try:
        store = dist.TCPStore(
            order["host"], order["port"], world, is_master=rank == 0, timeout=seconds, wait_for_workers=False
        )
        dist.init_process_group(kind, store=store, rank=rank, world_size=world, timeout=seconds)
        began = time.perf_counter()  # greetings are not the network's speed
        for device in gpus if kind == "nccl" else ["cpu"]:
            values = torch.full((REDUCE_VALUES,), float(rank + 1), device=device)
            dist.all_reduce(values)
            wanted = world * (world + 1) / 2
            if not bool((values == wanted).all()):
                raise Failed(f"a sum over {world} nodes on {device} is wrong")
        took = time.perf_counter() - began
        store.add("done", 1)
        while rank == 0 and store.add("done", 0) < world:  # the store ends with its process
            pause(0.005)
    except RuntimeError as error:  # torch's errors of the network are RuntimeErrors
        raise Failed(f"{kind}: {' '.join(str(error).split())[:300]}") from error
    return took, kind


CHECKS: dict[str, Callable[[dict[str, Any]], tuple[float, str]]] = {
    "matmul": matmul,
    "disk": disk,
    "gpu_memory": gpu_memory,
    "network": network,
    "all_reduce": all_reduce,
}


def main() -> None:
    order = json.loads(sys.argv[1])
    torch = torch_here()
    if torch is not None:
        torch.set_num_threads(1)  # as many as ranks have
    outcome, seconds, text = "passed", 0.0, ""
    try:
        seconds, text = CHECKS[order["check"]](order)
    except Failed as error:
        outcome, text = "failed", str(error)
    except Skipped as error:
        outcome, text = "skipped", str(error)
    print(json.dumps({"outcome": outcome, "seconds": seconds, "text": text}), flush=True)
    os._exit(0)  # process groups are not taken apart: that may wait for others


if __name__ == "__main__":
    main()
