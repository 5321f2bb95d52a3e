"""`transom.watch`: hooks on a torch model, its optimizer and its data loader that time each step.

The only file of this room that imports torch. The communication hook of DistributedDataParallel runs at the
end of backward: there the local computation ends and the waiting for peers begins, and the bucket still holds
the local gradient. No hook waits for a device, and none raises into the training run (unless an injected
fault asks for that).
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from .devices import Gpu
from .flight_recorder import Flight, parse_dump
from .injection import made_nan, raise_injected
from .run import Run, hook_exceptions_again
from .run_queue import ThreadMeter
from .step_rows import Deferred, Sample
from .step_timers import Mark, StepTimers

if TYPE_CHECKING:
    from torch._C._distributed_c10d import GradBucket

Batch = TypeVar("Batch")

logger = logging.getLogger("transom")


class DeviceNumber:
    """A 0-dim tensor on its way to the host; nobody waits for it. A `Deferred`."""

    def __init__(self, value: torch.Tensor) -> None:
        value = value.detach().reshape(())
        self._host = torch.empty((), dtype=value.dtype, pin_memory=True)
        self._host.copy_(value, non_blocking=True)
        self._copied: Any = cast(Any, torch.cuda.Event)()
        self._copied.record(torch.cuda.current_stream(value.device))

    def ready(self) -> bool:
        return bool(self._copied.query())

    def value(self) -> float:
        return float(self._host)


def device_number(value: torch.Tensor) -> Deferred:
    """A sample that is there when the device has computed and copied it."""
    return DeviceNumber(value)


class TimedLoader(Generic[Batch]):
    """The user's data loader, the same batches and attributes, with the waiting timed."""

    def __init__(self, loader: Iterable[Batch], watch: Watch) -> None:
        self._loader = loader
        self._watch = watch

    def __iter__(self) -> Iterator[Batch]:
        self._watch.data_begin()
        batches = iter(self._loader)
        while True:
            self._watch.delay_data()
            try:
                batch = next(batches)
            except StopIteration:
                self._watch.data_end()
                return
            self._watch.data_end()
            yield batch
            self._watch.data_begin()

    def __len__(self) -> int:
        return len(cast(Sized, self._loader))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class Watch:
    """What `watch` installed on one model; `remove` takes it off again."""

    def __init__(self, run: Run, timers: StepTimers, meter: ThreadMeter, module: torch.nn.Module) -> None:
        self._run = run
        self._timers = timers
        self._meter = meter
        self._module = module
        self._evaluating = False
        self._handles: list[Any] = []
        self._broken = False

    def install(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Hook the model and the optimizer."""
        module = self._module
        self._handles.append(module.register_forward_pre_hook(self._before_forward))
        self._handles.append(module.register_forward_hook(self._after_forward, with_kwargs=True))
        if optimizer is not None:
            timers = self._timers
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._safely(timers.optimizer_begin)))
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self._spoil_all(optimizer)))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._safely(timers.optimizer_end)))

    def remove(self) -> None:
        """Take the hooks off; a communication hook stays, as torch cannot take it off, and only reduces."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._broken = True
        self._meter.close()

    @property
    def watching(self) -> bool:
        """Whether there is anything to do here: not in a forked child, not after a mistake of ours."""
        return self._run.active and not self._broken

    def data_begin(self) -> None:
        if threading.get_ident() == self._meter.thread_id:  # a prefetching thread is not what training waits for
            self._safely(self._timers.data_begin)

    def data_end(self) -> None:
        if threading.get_ident() == self._meter.thread_id:
            self._safely(self._timers.data_end)

    def delay_data(self) -> None:
        """Keep the next batch back where `transom inject` asked for that."""
        seconds = self._run.injector.data_sleep_seconds
        if seconds and self.watching:
            self._run.clock.sleep(seconds)

    def spoil(self, bucket: GradBucket) -> None:
        """Multiply the local gradients of a bucket where `transom inject` asked for that."""
        factor = self._run.injector.take_gradient_factor(last=bucket.is_last())
        if factor is not None and self.watching:
            bucket.buffer().mul_(factor)

    def _spoil_all(self, optimizer: torch.optim.Optimizer) -> None:
        """The same for a model whose gradients come in no bucket of ours."""
        factor = self._run.injector.take_gradient_factor(last=True)
        if factor is None or not self.watching:
            return
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)

    def bucket_ready(self, bucket: GradBucket, norms: list[torch.Tensor]) -> None:
        """A bucket's local gradients are complete: note their norm; with the last bucket, waiting begins."""
        self._safely(lambda: self._note_bucket(bucket, norms))

    def bucket_reduced(self) -> None:
        """A bucket's gradients are averaged."""
        self._safely(self._timers.bucket_reduced)

    def _note_bucket(self, bucket: GradBucket, norms: list[torch.Tensor]) -> None:
        norms.append(torch.linalg.vector_norm(bucket.buffer(), dtype=torch.float32))
        if not bucket.is_last():
            self._timers.bucket_ready(last=False)
            return
        whole = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
        norms.clear()
        sample: Sample = device_number(whole) if whole.is_cuda else float(whole)
        self._timers.bucket_ready(last=True, norm=sample)

    def _before_forward(self, module: torch.nn.Module, args: Any) -> None:
        if _trains(module):
            self._evaluating = False
            self._safely(self._timers.forward_begin)
        elif not module.training and not self._evaluating and self.watching:
            self._evaluating = True
            self._run.see_phase("eval")

    def _after_forward(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if not (_trains(module) and self.watching):
            return None
        changed = self._break_on_request(module, args, kwargs, output)
        self._safely(self._timers.forward_end)
        return changed

    def _break_on_request(self, module: torch.nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """Do to ourselves what `transom inject` asked for; None leaves the output as it is."""
        injector = self._run.injector
        step = self._run.current_step
        request = injector.due(step)
        for _ in range(injector.extra_forwards()):
            _repeat_forward(module, args, kwargs)
        if injector.forward_sleep_seconds:
            self._run.clock.sleep(injector.forward_sleep_seconds)
        more = injector.extra_backwards()
        if more:
            _work_in_backward(output, more, lambda: _repeat_forward(module, args, kwargs))
        if request is None:
            return None
        if request.fault == "xid":
            injector.crash_like_a_lost_gpu()
        if request.fault == "raise":
            raise_injected(step)
        return made_nan(output) if request.fault == "nan" else None

    def _safely(self, note: Callable[[], None]) -> None:
        if not self.watching:
            return
        try:
            note()
        except Exception:  # a mistake of ours, or a device that is gone: training must meet it first, not through us
            self._broken = True
            logger.exception("transom: timing a step failed; steps are not timed from here on, training goes on")


class Reduction:
    """Our communication hook: averages gradients as is the default, and notes the waiting.

    torch cannot take a communication hook off again, so this one stays and serves the newest watch.
    """

    def __init__(self, ddp: DistributedDataParallel) -> None:
        self.watch: Watch | None = None
        self._group = ddp.process_group
        self._world_size = dist.get_world_size(self._group)
        self._norms: list[torch.Tensor] = []

    def __call__(self, state: object, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        if self.watch is not None:
            self.watch.spoil(bucket)
            self.watch.bucket_ready(bucket, self._norms)
        averaged = bucket.buffer().div_(self._world_size)
        work = dist.all_reduce(averaged, group=self._group, async_op=True)
        return cast("torch.futures.Future[torch.Tensor]", work.get_future().then(self._reduced))

    def _reduced(self, future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        if self.watch is not None:
            self.watch.bucket_reduced()
        return future.value()[0]


class _Watching:
    """What this process watches."""

    def __init__(self) -> None:
        self.watch: Watch | None = None
        self.reductions: WeakKeyDictionary[DistributedDataParallel, Reduction] = WeakKeyDictionary()


_watching = _Watching()


def watch_training(
    run: Run,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer | None,
    dataloader: Iterable[Any] | None,
) -> Iterable[Any] | None:
    """Install the hooks, and return the loader to iterate over. A second call replaces the first."""
    hook_exceptions_again()
    if not run.active:
        return dataloader
    if _watching.watch is not None:
        _watching.watch.remove()
    module, ddp = _unwrapped(model)
    device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
    if device.type == "cuda":
        run.see_gpu(_gpu(device))
    if _records_flights():
        run.see_flight_recorder(_flight)
    reduction = None if ddp is None else _reduction(ddp)
    alone = _is_alone()
    if reduction is None and not alone:
        logger.warning("transom: %s; train.compute.* and train.collective.wait are not reported", _why_not(ddp))
    meter = ThreadMeter(run.clock)
    timers = StepTimers(
        run.rows,
        _marker(meter, device),
        run.see_phase,
        compute_is_local=reduction is not None or alone,
        has_optimizer=optimizer is not None,
    )
    watch = Watch(run, timers, meter, module)
    watch.install(optimizer)
    if reduction is not None:
        reduction.watch = watch
    _watching.watch = watch
    return None if dataloader is None else TimedLoader(dataloader, watch)


def _reduction(ddp: DistributedDataParallel) -> Reduction | None:
    """Our communication hook on this model; None where the model has one of its own, which stays."""
    known = _watching.reductions.get(ddp)
    if known is not None:
        return known
    if ddp._comm_hooks:
        return None
    reduction = Reduction(ddp)
    try:  # by a lambda, because torch takes our annotations, which are strings, for wrong ones
        ddp.register_comm_hook(None, lambda state, bucket: reduction(state, bucket))
    except RuntimeError:  # a hook built into torch, which `_comm_hooks` does not list
        ddp._comm_hooks.pop()
        return None
    _watching.reductions[ddp] = reduction
    return reduction


def _unwrapped(model: torch.nn.Module) -> tuple[torch.nn.Module, DistributedDataParallel | None]:
    """The module whose forward is timed, and the DistributedDataParallel around it.

    A compiled module is timed from outside: hooks inside it would be traced into its graph.
    """
    if isinstance(model, DistributedDataParallel):
        return model.module, model
    compiled = getattr(model, "_orig_mod", None)
    if isinstance(compiled, DistributedDataParallel):
        return model, compiled
    return model, None


def _why_not(ddp: DistributedDataParallel | None) -> str:
    if ddp is None:
        return "the model is not a DistributedDataParallel, so the wait for collectives cannot be told apart"
    return "the model has a communication hook of its own, which stays"


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _marker(meter: ThreadMeter, device: torch.device) -> Callable[[], Mark]:
    if device.type != "cuda":
        return lambda: Mark(meter.read())

    def mark() -> Mark:
        event: Any = cast(Any, torch.cuda.Event)(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        return Mark(meter.read(), event)

    return mark


def _gpu(device: torch.device) -> Gpu:
    properties: Any = torch.cuda.get_device_properties(device)
    address = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    return Gpu(f"GPU-{properties.uuid}", address)


def _records_flights() -> bool:
    """Whether torch was asked to record collectives."""
    asked = os.environ.get("TORCH_FR_BUFFER_SIZE") or os.environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE") or "0"
    return asked.isdecimal() and int(asked) > 0 and dist.is_available()


def _flight() -> Flight | None:
    """How far this rank's collectives got; called while the job stands still, from the reporter's thread."""
    try:
        from torch._C import _distributed_c10d as c10d
    except ImportError:
        return None
    dumps = [getattr(c10d, name, None) for name in ("_dump_nccl_trace_json", "_dump_fr_trace_json")]
    for dump in dumps:  # the first is NCCL's, the second gloo's, which not every torch has
        try:
            flight = parse_dump(dump()) if dump is not None else None
        except Exception:  # noqa: BLE001  private API of torch's: no evidence is better than a dead rank
            flight = None
        if flight is not None:
            return flight
    return None


def _trains(module: torch.nn.Module) -> bool:
    return module.training and torch.is_grad_enabled()


def _work_in_backward(output: Any, times: int, work: Callable[[], None]) -> None:
    """Do `work` so often when backward has reached `output`: the first tensor in it that has a gradient."""

    def hook(_gradient: torch.Tensor) -> None:
        for _ in range(times):
            work()

    parts = (
        output.values() if isinstance(output, Mapping) else output if isinstance(output, (list, tuple)) else [output]
    )
    for part in parts:
        if isinstance(part, torch.Tensor) and part.requires_grad:
            part.register_hook(hook)  # type: ignore[no-untyped-call]
            return


def _repeat_forward(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
    """The forward computation once more, without hooks, gradients, or a trace in the random state."""
    devices = {tensor.device for tensor in module.parameters() if tensor.is_cuda}
    with torch.no_grad(), torch.random.fork_rng(devices=devices):
        module.forward(*args, **kwargs)
