"""The simulated month for a person: one table, bars in the terminal, and the same as an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from xml.sax.saxutils import escape

from rich.table import Table

from pipelines.month.result import Summary

BAR_CHARACTERS = 30
ROW_PIXELS, LABEL_PIXELS, BAR_PIXELS, MARGIN_PIXELS = 26, 300, 480, 16
USEFUL, DOWN, LOST = "#2f7d4f", "#b3432b", "#c9a227"
WORDS = ((USEFUL, "training that counts"), (LOST, "trained and lost, or spent on saving"), (DOWN, "down"))


def table_of(summaries: Sequence[Summary]) -> Table:
    """One line for each policy and fleet; what is not goodput is down time, or work that was lost."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("policy", "GPUs", "goodput", "", "repair, mean/median", "failures", "restarts", "pages"):
        table.add_column(name, justify="left" if name in ("policy", "") else "right")
    for one in summaries:
        table.add_row(
            one.policy,
            one.fleet,
            f"{100 * one.goodput:.1f} ± {100 * one.goodput_sd:.1f} %",
            _bar(one),
            f"{one.mttr_mean_seconds / 60:.1f} / {one.mttr_median_seconds / 60:.1f} min",
            f"{one.failures:.0f}",
            f"{one.restarts:.0f}",
            f"{one.pages:.1f}",
        )
    return table


def _bar(one: Summary) -> str:
    useful = round(BAR_CHARACTERS * one.goodput)
    down = round(BAR_CHARACTERS * min(1.0 - one.goodput, one.down_share))
    rest = BAR_CHARACTERS - useful - down
    return f"[green]{'█' * useful}[/][yellow]{'▒' * rest}[/][red]{'░' * down}[/]"


def svg_of(summaries: Sequence[Summary], title: str) -> str:
    """A bar for each policy and fleet: what of the month was training, what was lost, what stood still."""
    height = MARGIN_PIXELS * 2 + 56 + ROW_PIXELS * len(summaries)
    width = MARGIN_PIXELS * 2 + LABEL_PIXELS + BAR_PIXELS + 70
    rows = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="{MARGIN_PIXELS}" y="{MARGIN_PIXELS + 12}" font-size="15" font-weight="600">{escape(title)}</text>',
    ]
    x = float(MARGIN_PIXELS)
    for colour, words in WORDS:
        rows.append(f'<rect x="{x:.0f}" y="{MARGIN_PIXELS + 26}" width="12" height="12" fill="{colour}"/>')
        rows.append(f'<text x="{x + 17:.0f}" y="{MARGIN_PIXELS + 37}">{escape(words)}</text>')
        x += 40 + 7.2 * len(words)
    top = MARGIN_PIXELS + 52
    for number, one in enumerate(summaries):
        rows += _row(one, top + number * ROW_PIXELS)
    rows.append("</svg>")
    return "\n".join(rows) + "\n"


def _row(one: Summary, y: int) -> list[str]:
    down = min(1.0 - one.goodput, one.down_share)
    shares = ((USEFUL, one.goodput), (LOST, max(0.0, 1.0 - one.goodput - down)), (DOWN, down))
    label = f"{one.policy}, {one.fleet} GPUs"
    rows = [f'<text x="{MARGIN_PIXELS}" y="{y + 15}">{escape(label)}</text>']
    x = float(MARGIN_PIXELS + LABEL_PIXELS)
    for colour, share in shares:
        width = BAR_PIXELS * share
        rows.append(f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW_PIXELS - 6}" fill="{colour}"/>')
        x += width
    rows.append(f'<text x="{x + 6:.0f}" y="{y + 15}">{100 * one.goodput:.1f} %</text>')
    return rows
