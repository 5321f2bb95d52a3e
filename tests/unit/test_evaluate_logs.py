"""`transom evaluate logs` reads cases as people write them and counts right and wrong as they would."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pipelines.__main__ import app
from pipelines.evaluate.evaluation import CannotEvaluate
from pipelines.evaluate.log_cases import LogCase, read_cases
from pipelines.evaluate.logs import Answer, Methods, culprits, score

MARKDOWN = """# Real logs

words, `code` and

```
a fence that belongs to no case
```

## L01 — `cuda_oom` → `stop_notify`
Source: somewhere
Culprit: rank 2
```
[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.
## not a heading
```

## L02 — `none` → `none`
```text
all is well
```

## Benign lines that must NOT fire any rule
```
loss scale: 65536.0
NCCL watchdog enabled

```

(words behind it)

## Where more can be found
```
CUDA out of memory
```
"""


def test_markdown_is_read_by_its_headings_and_fences(tmp_path: Path) -> None:
    path = tmp_path / "cases.md"
    path.write_text(MARKDOWN)
    first, second, benign = read_cases(path)
    assert (first.id, first.symptom, first.action, first.culprit) == ("L01", "cuda_oom", "stop_notify", "rank 2")
    assert first.lines[1] == "## not a heading"
    assert (second.id, second.symptom) == ("L02", "none")
    assert (benign.benign, benign.lines) == (True, ("loss scale: 65536.0", "NCCL watchdog enabled", ""))


def test_a_file_without_cases_is_refused_in_a_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.md"
    path.write_text("# nothing\n")
    with pytest.raises(CannotEvaluate, match="holds no cases"):
        read_cases(path)
    with pytest.raises(CannotEvaluate, match="cannot be read"):
        read_cases(tmp_path / "absent.md")
    (tmp_path / "y.jsonl").write_text('{"id": 3}\n')
    with pytest.raises(CannotEvaluate, match="line 1 of"):
        read_cases(tmp_path / "y.jsonl")


def test_a_finer_name_of_ours_counts_as_the_coarser_one_and_a_speaking_benign_line_counts() -> None:
    cases = [
        LogCase(id="a", symptom="host_oom", action="stop_notify", lines=("x",)),
        LogCase(id="b", symptom="host_oom", action="stop", lines=("x",)),
        LogCase(id="c", symptom="gpu_ecc", action="stop_notify", lines=("x",)),
        LogCase(id="d", benign=True, lines=("x", "")),
    ]
    counted = score("it", lambda _: Answer("host_alloc", "stop_notify"), cases)
    assert (counted.cases, counted.symptom, counted.action) == (3, 2, 3)
    assert [case.id for case, _ in counted.misses] == ["c"]
    assert (counted.benign, counted.spoke) == (2, 2), "the line alone, and all lines together"


def test_culprits_count_where_the_file_names_a_rank_or_nobody() -> None:
    oom = "[rank2]: torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    cases = [
        LogCase(id="a", culprit="rank 2", lines=(oom,)),
        LogCase(id="b", culprit="rank 3", lines=(oom,)),
        LogCase(id="c", culprit="the store host", lines=(oom,)),
    ]
    assert culprits(Methods(), cases) == (1, 2)


def test_figures_misses_and_baselines_go_to_a_file(tmp_path: Path) -> None:
    path, told = tmp_path / "cases.md", tmp_path / "told.json"
    path.write_text(MARKDOWN.replace("`none` → `none`", "`gpu_ecc` → `stop_notify`"))
    result = CliRunner().invoke(app, ["evaluate", "logs", str(path), "--json", str(told)])
    assert result.exit_code == 0, result.output
    tree = json.loads(told.read_text())
    figures = {figure["name"]: (figure["value"], figure["n"]) for figure in tree["figures"]}
    assert figures == {
        "logs.class": (0.5, 2), "logs.action": (0.5, 2), "logs.benign_false": (0, 3), "logs.culprit": (1.0, 1),
    }  # fmt: skip
    assert [miss["id"] for miss in tree["misses"]] == ["L02"]
    assert len(tree["baselines"]) == 2
    assert "L02" in result.stdout


def test_a_target_that_is_neither_name_nor_path_is_refused() -> None:
    with pytest.raises(CannotEvaluate, match="no target"):
        CliRunner().invoke(app, ["evaluate", "nothing-such"], catch_exceptions=False)
