"""Composes `harbour.txt`, which the demo's model learns: sentences of a small grammar and a seed.

The text is this project's own (Apache-2.0). `python -m pipelines.demo_job.compose_text` writes the file
again.
"""

from __future__ import annotations

import random
from pathlib import Path

TEXT_PATH = Path(__file__).with_name("harbour.txt")
TEXT_BYTES_MIN = 100_000
SEED = 20_261
SENTENCES_PER_PARAGRAPH = (3, 7)

GRAMMAR: dict[str, tuple[str, ...]] = {
    "sentence": (
        "{When} {who} {did} {what}, {who} {did} {what}.",
        "{Who} {did} {what} {where}, and {who} {did} {what}.",
        "{Who} {did} {what} because {reason}.",
        "{Where}, {who} {did} {what}.",
        '"{Reason}," said {who}, "and {reason}."',
        "Nobody {where} knew that {reason}, but {who} {did} {what}.",
        "{Number} {things} lay {where}; {who} {did} the {adjective} one.",
    ),
    "when": ("before dawn", "after the storm", "at high water", "in the night watch", "when the wind turned"),
    "who": (
        "the harbour master", "an old shipwright", "the first mate", "the lighthouse keeper", "a young rigger",
        "the captain of the {ship}", "the pilot", "the net mender", "her brother", "the carpenter's daughter",
    ),
    "did": ("found", "mended", "lost", "painted", "counted", "measured", "carried away", "asked for", "forgot", "sold"),
    "what": (
        "the {adjective} {thing}", "a {adjective} {thing}", "{number} {things}", "the {thing} of the {ship}",
        "every {thing} {where}", "nothing but a {thing}",
    ),
    "where": (
        "behind the pier", "under the stern", "on the north quay", "along the breakwater", "below deck",
        "in the sail loft", "beside the slipway", "near the {adjective} buoy", "at the mouth of the river",
    ),
    "reason": (
        "the tide will not wait", "the {thing} is {adjective}", "there are {number} {things} too many",
        "the {ship} came home without her {thing}", "the wind has gone round to the west",
        "the {adjective} {thing} holds the whole stern together", "fog hides the {adjective} buoy",
    ),
    "thing": ("transom", "rudder", "anchor", "lantern", "hawser", "keel", "compass", "mast", "oar", "ledger", "chart"),
    "things": ("oars", "lanterns", "barrels", "planks", "ropes", "charts", "anchors", "sails", "hooks", "bells"),
    "adjective": ("wooden", "broken", "new", "heavy", "tarred", "crooked", "silent", "bright", "rusty", "borrowed"),
    "number": ("two", "three", "five", "seven", "eleven", "a dozen", "twenty"),
    "ship": ("Patience", "Grey Heron", "Second Sister", "Meridian", "Halcyon", "Good Intent"),
}  # fmt: skip


def composed_text() -> str:
    """The whole text, the same for the same seed."""
    dice = random.Random(SEED)
    paragraphs: list[str] = []
    size = 0
    while size < TEXT_BYTES_MIN:
        count = dice.randint(*SENTENCES_PER_PARAGRAPH)
        paragraphs.append(" ".join(expanded("{sentence}", dice) for _ in range(count)))
        size += len(paragraphs[-1]) + 2
    return "\n\n".join(paragraphs) + "\n"


def expanded(template: str, dice: random.Random) -> str:
    """`template` with every {name} replaced by one of its forms; a capital name begins with a capital."""
    before, brace, rest = template.partition("{")
    if not brace:
        return before
    name, _, after = rest.partition("}")
    form = expanded(dice.choice(GRAMMAR[name.lower()]), dice)
    if name[0].isupper():
        form = form[0].upper() + form[1:]
    return before + form + expanded(after, dice)


if __name__ == "__main__":
    TEXT_PATH.write_text(composed_text(), encoding="utf-8")
