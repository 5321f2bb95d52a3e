"""Progress lines and the life of a training job, as the usual trainers print them: steps, losses, bad numbers."""

from __future__ import annotations

import re
from typing import Literal, NamedTuple

import msgspec

NUMBER = r"[-+]?(?:\d[\d,]*\.?\d*(?:[eE][-+]?\d+)?|\.\d+(?:[eE][-+]?\d+)?|nan|NaN|[Ii]nf(?:inity)?)"
_LEVEL = (
    r"(?:\[[\w./:-]{1,60}\]\s*|(?:INFO|DEBUG|WARNING|INFO:[\w.-]*|[IW]\d{3,4} \S+ +\S+ \S+\])[:| -]*\s*"
    r"|[\w.-]{1,40} - INFO - |\| |- )"
)

# The beginning of a line by which it is known; the group that matched names the trainer.
HEAD = re.compile(
    rf"\s*+(?>{_LEVEL}){{0,6}}+(?:"
    r"(?P<megatron>iteration\s+\d+\s*/\s*\d+\s*\|)"
    r"|(?P<deepspeed>steps?:\s*\d+ loss:|(?:rank=\d+ )?(?:time|epoch)=\S+/(?:micro_)?step=\d+|step=\d+, skipped=)"
    r"|(?P<trainer>\{'(?:loss|grad_norm|eval_\w+|train_\w+|learning_rate|step|epoch)':)"
    r"|(?P<bar>(?:[^|\[\]{}]{0,80}?:\s*)?\d{1,3}%\|[^|]{0,400}\|\s*\d[\d.kMG]*/\d[\d.kMG?]* \["
    r"|\d+/\d+ \[\d+:\d\d|\d+it \[\d+:\d\d)"
    r"|(?P<nanogpt>iter \d+: loss |step \d+: train loss )"
    r"|(?P<titan>step:\s*\d+\s+(?:loss:|-\s+\S+:))"
    r"|(?P<mm>Epoch ?\((?:train|val|test)\) *\[\d+\]\[ *\d+/\d+\]|Iter\((?:train|val|test)\) *\[ *\d+/\d+\])"
    r"|(?P<nemo>Training epoch \d+, iteration \d+/\d+ \||Epoch \d+/\d+ [━╸╺ ]+)"
    r"|(?P<plain>(?:train(?:ing)?\b\W{0,3}|global[ _])?"
    r"(?:[Ee]poch|EPOCH|[Ss]teps?|STEP|[Ii]ter(?:ation)?s?|[Bb]atch|[Uu]pdate)"
    r"\b[\s:=#\[(|]{0,6}\d)"
    r")", re.ASCII,
)  # fmt: skip
LOSS_NEAR = re.compile(r"\bloss\b|_loss\b|grad_norm|grad norm|tokens?[/_]s|it/s|samples?[/_]s|\bppl\b|\blr\b")
# Somebody has failed in a step, or at saving: that is no line of progress and no ordinary life.
TROUBLE = re.compile(
    r"\b[A-Z]\w{0,60}(?:Error|Exception)\b|\b[Ff]ailed\b|\berror:|\[Errno |\bout of memory\b|\bcorrupt"
)
BAR_END = re.compile(r"\[[^\[\]]{0,400}\]")
BAD_LOSS = re.compile(
    r"(?:^|[\s{|,'\"/\[(])[a-z_/]{0,40}?(?:loss)[a-z_0-9]{0,20}['\"]?\s*[:=]?\s*['\"]?(?:tensor\()?"
    r"(?:[-+]?inf(?:inity)?|[-+]?nan)\b"
    r"|(?:^|[\s{|,'\"/\[(])(?:global_)?g(?:rad(?:ient)?)?[ _]?norm['\"]?\s*[:=]?\s*['\"]?(?:tensor\()?[-+]?nan\b"
    r"|number of nan iterations:\s*[1-9]", re.ASCII
)  # fmt: skip
NAN_COUNT = "nan iterations:"


class Bar(NamedTuple):
    """What matching needs of a progress line. `rest_at`: something else was printed behind it; -1: nothing was."""

    numbers_bad: bool
    rest_at: int


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """What one progress line says. None where it does not say it."""

    trainer: str  # megatron, deepspeed, trainer (Hugging Face), bar (tqdm, Lightning), nanogpt, titan, mm, nemo, plain
    step: int | None = None
    total: int | None = None
    epoch: float | None = None
    loss: float | None = None
    grad_norm: float | None = None
    step_seconds: float | None = None
    samples: int | None = None
    nan_iterations: int = 0
    skipped_iterations: int = 0
    phase: Literal["train", "eval"] = "train"

    @property
    def numbers_bad(self) -> bool:
        """A loss that is no number, or a gradient norm that is NaN; an infinite norm may be a loss scaler's search."""
        loss, norm = self.loss, self.grad_norm
        return self.nan_iterations > 0 or (loss is not None and not abs(loss) < float("inf")) or norm != norm


class Lifecycle(msgspec.Struct, frozen=True, kw_only=True):
    """One event of a job's life, as its trainer or launcher prints it."""

    what: Literal[
        "checkpoint_begun", "checkpoint_done", "checkpoint_loaded", "eval_begun", "eval_done", "training_begun",
        "training_done", "workers_failed", "workers_started", "world_size",
    ]  # fmt: skip
    step: int | None = None
    attempts_left: int | None = None
    attempts_max: int | None = None
    world_size: int | None = None


def read_bar(text: str) -> Bar | None:
    """Whether `text` (without prefixes) is a progress line, and what about it could matter; None where it is none."""
    head = HEAD.match(text)
    if head is None:
        return None
    if head.lastgroup == "plain" and (
        LOSS_NEAR.search(text, head.end(), head.end() + 300) is None or TROUBLE.search(text) is not None
    ):
        return None
    rest_at = -1
    if head.lastgroup == "bar":
        end = BAR_END.search(text, head.end() - 8)
        if end is not None and len(text) - end.end() > 3:
            rest_at = _rest(text, end.end())
            if rest_at >= 0:
                text = text[:rest_at]
    lower = text.lower()
    if "nan" not in lower and "inf" not in lower:
        return Bar(False, rest_at)
    at = lower.find(NAN_COUNT)
    if at >= 0 and lower.count("nan") == 1 and "inf" not in lower:
        return Bar(lower[at + len(NAN_COUNT) :].lstrip()[:1] in "123456789", rest_at)
    return Bar(BAD_LOSS.search(lower) is not None, rest_at)


def _rest(text: str, at: int) -> int:
    """Where another line begins that was printed behind a bar; -1 where only the bar's own numbers follow."""
    rest = text[at:].lstrip(" ,")
    if len(rest) < 4 or (rest[0] in "0123456789" and "%|" in rest[:120]):
        return -1
    return -1 if re.match(r"[\w./ ]{1,40}[=:]\s?['\"]?[-+]?[\d.]", rest) else len(text) - len(rest)


def _number(text: str) -> float | None:
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return None


_STEP = (
    re.compile(r"\biteration\s+(\d+)\s*/\s*(\d+)"),
    re.compile(r"\biteration\s+(\d+)/(\d+)"),
    re.compile(r"'step':\s*(\d+)|\bglobal_step[:=\s]+(\d+)|\bnum_updates[:=\s]+(\d+)|\bglobal step[:=\s]+(\d+)"),
    re.compile(r"(\d+)/(\d+) \["),
    re.compile(r"\] ?\[ *(\d+)/(\d+)\]"),
    re.compile(
        r"\b(?:[Ss]teps?|STEP|[Ii]ter(?:ation)?s?|micro_step|[Uu]pdate|[Bb]atch)\b"
        r"[\s:=#\[(|]{0,6}(\d+)(?:\s*(?:/|of)\s*(\d+))?"
    ),
    re.compile(r"^\s*(\d+)it \["),
)  # fmt: skip
_LOSS = re.compile(
    rf"(?:^|[\s{{|,'\"(\[])(?:lm loss|[\w./-]*?loss)['\"]?\s*[:=]?\s*['\"]?(?:tensor\()?({NUMBER})(?![\w.])", re.ASCII
)  # fmt: skip
_NORM = re.compile(
    rf"(?:global_)?g(?:rad(?:ient)?)?[ _]?norm['\"]?\s*[:=]?\s*['\"]?(?:tensor\()?({NUMBER})(?![\w.])", re.ASCII
)
_EPOCH = re.compile(rf"[Ee]poch'?\b\W{{0,4}}?({NUMBER})")
_SAMPLES = re.compile(r"(?:consumed samples|samples seen|consumed_samples)\W{1,16}(\d[\d,]*)")
_SECONDS = (
    (re.compile(r"elapsed time per iteration \(ms\):\s*([\d.]+)"), 1e-3),
    (re.compile(r"([\d.]+)\s?s/it"), 1.0),
    (re.compile(r"iter time \(s\):\s*([\d.]+)"), 1.0),
    (re.compile(r"train_step_timing in s:\s*([\d.]+)"), 1.0),
    (re.compile(r"\btime[:=]? ([\d.]+) ?ms"), 1e-3),
)
_RATE = re.compile(r"([\d.]+)\s?it/s")
_NAN_ITERATIONS = re.compile(r"number of nan iterations:\s*(\d+)")
_SKIPPED = re.compile(r"number of skipped iterations:\s*(\d+)")
_EVAL = re.compile(r"\beval|\bval(?:id(?:ation)?)?\b|'eval_|Epoch\(val\)")


def parse_progress(text: str) -> Progress | None:
    """What a progress line (without prefixes) says; None where `read_bar` sees none in it."""
    head = HEAD.match(text)
    if head is None or read_bar(text) is None:
        return None
    step, total = _step_of(text)
    loss, norm = _LOSS.search(text), _NORM.search(text)
    epoch, samples = _EPOCH.search(text), _SAMPLES.search(text)
    nan, skipped = _NAN_ITERATIONS.search(text), _SKIPPED.search(text)
    return Progress(
        trainer=head.lastgroup or "plain", step=step, total=total,
        epoch=_number(epoch[1]) if epoch else None, loss=_number(loss[1]) if loss else None,
        grad_norm=_number(norm[1]) if norm else None, step_seconds=_seconds_of(text),
        samples=int(samples[1].replace(",", "")) if samples else None,
        nan_iterations=int(nan[1]) if nan else 0, skipped_iterations=int(skipped[1]) if skipped else 0,
        phase="eval" if _EVAL.search(text[:80]) else "train",
    )  # fmt: skip


def _step_of(text: str) -> tuple[int | None, int | None]:
    for pattern in _STEP:
        found = pattern.search(text[:400])
        if found is not None:
            numbers = [int(group) for group in found.groups() if group is not None and len(group) < 16]
            if numbers:
                return numbers[0], numbers[1] if len(numbers) > 1 else None
    return None, None


def _seconds_of(text: str) -> float | None:
    for pattern, unit in _SECONDS:
        found = pattern.search(text)
        if found is not None:
            value = _number(found[1])
            return None if value is None else value * unit
    rate = _RATE.search(text)
    per_second = _number(rate[1]) if rate is not None else None
    return 1.0 / per_second if per_second else None


_LIFE: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("checkpoint_begun", re.compile(
        r"^[Ss]aving (?:model |a |the )?checkpoint|^\[Rank \d+\] Saving model checkpoint"
        r"|^Saving (?:model|state) (?:checkpoint )?to|^(?:\[Torch\] )?Saving \S+\.(?:pt|bin|safetensors)\b"
    )),
    ("checkpoint_done", re.compile(
        r"^successfully saved checkpoint|^[Cc]heckpoint saved|^Saved (?:model |state )?checkpoint"
        r"|^(?:\[Torch\] )?Saved \S+\.(?:pt|bin|safetensors)\b|^Finished saving (?:the )?checkpoint"
        r"|^Model weights saved in"
    )),
    ("checkpoint_loaded", re.compile(
        r"^successfully loaded checkpoint"
        r"|^(?:Resum(?:ed|ing)|Restored|Loaded) (?:training )?(?:from )?(?:the )?(?:state from )?checkpoint"
    )),
    ("eval_begun", re.compile(
        r"^\*{3,5} Running (?:Evaluation|Prediction) \*{3,5}|^Evaluating (?:on|iter)|^Starting evaluation"
    )),
    ("eval_done", re.compile(
        r"^validation loss at iteration|^\*{3,5} eval metrics \*{3,5}|^Evaluation (?:finished|done|complete)"
    )),
    ("training_begun", re.compile(
        r"^training \.\.\.|^\*{3,5} Running training \*{3,5}|^\[before the start of training step\]|^Training starts"
    )),
    ("training_done", re.compile(
        r"^\[after training is done\]|^Training completed\.|^`?Trainer\.fit`? stopped: |^\*{3,5} train metrics \*{3,5}"
    )),
    ("workers_failed", re.compile(r"Worker group FAILED\b|\(FAILED\) local_rank")),
    ("workers_started", re.compile(
        r"Starting worker group|Starting elastic_operator with launch configs|All distributed processes registered"
    )),
    ("world_size", re.compile(r"(?:using )?\bworld[ _]size\b\s*(?:[:=]|is|\.{3,})?\s*\d+", re.IGNORECASE)),
)  # fmt: skip
_LIFE_STEP = re.compile(r"(?:iteration|step|checkpoint-|global_step|iter_)[\s:=]*0*(\d{1,15})")
_ATTEMPTS = re.compile(r"(\d+)/(\d+) attempts left")
_WORLD = re.compile(r"world[ _]size\b\s*(?:[:=]|is|\.{3,})?\s*(\d{1,7})", re.IGNORECASE)
_LIFE_PIECES = (
    "checkpoint", "aving", "eval", "training", "metrics", "worker group", "world", "processes registered",
    "elastic_operator", "(failed)", "trainer.fit", "weights saved", "validation loss",
)  # fmt: skip
_LEVELS = re.compile(rf"^(?>{_LEVEL}){{1,6}}+")


def parse_lifecycle(text: str) -> Lifecycle | None:
    """The event of a job's life that a line (without prefixes) tells of, if it tells of one."""
    lower = text[:300].lower()
    if not any(piece in lower for piece in _LIFE_PIECES):
        return None
    levels = _LEVELS.match(text)
    bare = text[levels.end() :] if levels is not None else text
    bare = bare.lstrip()
    for what, pattern in _LIFE:
        if pattern.search(bare[:400]) is None:
            continue
        step, attempts = _LIFE_STEP.search(bare), _ATTEMPTS.search(bare)
        world = _WORLD.search(bare)
        return msgspec.convert(
            {
                "what": what, "step": int(step[1]) if step else None,
                "attempts_left": int(attempts[1]) if attempts else None,
                "attempts_max": int(attempts[2]) if attempts else None,
                "world_size": int(world[1]) if world else None,
            },
            Lifecycle,
        )  # fmt: skip
    return None


def is_lifecycle(text: str) -> bool:
    """Whether a line tells of the job's ordinary life: such lines are consumed, no rule sees them."""
    life = parse_lifecycle(text)
    ordinary = life is not None and life.what not in ("world_size", "workers_failed")
    return ordinary and TROUBLE.search(text) is None
