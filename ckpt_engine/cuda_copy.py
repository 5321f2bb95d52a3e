"""Copies from a GPU straight into a mapped slot: its pages registered with CUDA, on a stream beside the training's.

Imported only where a tensor on a GPU is saved. Where the pages cannot be registered, CUDA copies through its own
pinned buffer, which is slower and as right.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

CUDA_SUCCESS = 0
REGISTER_DEFAULT = 0


class PinnedMapping:
    """One slot's mapping as CUDA sees it. The mapping must stay until `close`."""

    def __init__(self, torch: Any, address: int, size_bytes: int) -> None:
        self._torch = torch
        self._address = address
        self._streams: dict[Any, Any] = {}
        self._waits: list[Any] = []
        result = int(torch.cuda.cudart().cudaHostRegister(address, size_bytes, REGISTER_DEFAULT))
        self._registered = result == CUDA_SUCCESS
        if not self._registered:
            _log.warning(
                "CUDA does not take the checkpoint slot's %d bytes as pinned memory (error %d): saves from the GPU are "
                "slower; raise the limit of locked memory (ulimit -l)",
                size_bytes,
                result,
            )

    def enqueue(self, target: Tensor, source: Tensor) -> None:
        """Begin to copy `source` as it is once the work that is queued on its device now is done."""
        cuda, device = self._torch.cuda, source.device
        stream = self._streams.get(device)
        if stream is None:
            stream = self._streams[device] = cuda.Stream(device=device)
        stream.wait_stream(cuda.current_stream(device))
        with cuda.stream(stream), self._torch.no_grad():
            target.copy_(source, non_blocking=self._registered)
            source.record_stream(stream)  # its memory is not given to anybody before the copy has read it
        if stream not in self._waits:
            self._waits.append(stream)

    def wait(self) -> None:
        """Until every byte is there. Raises RuntimeError where a copy failed."""
        waits, self._waits = self._waits, []
        for stream in waits:
            event = self._torch.cuda.Event()
            event.record(stream)
            event.synchronize()

    def close(self) -> None:
        """Give the pages back. Nothing may be under way."""
        self.wait()
        if self._registered:
            self._registered = False
            self._torch.cuda.cudart().cudaHostUnregister(self._address)
