"""The page put together: what was counted, in words, tables and plots, through a template that escapes every value."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib.resources import files
from importlib.util import find_spec
from typing import Any

from batchgen.errors import UsageError
from batchgen.reporting import tables
from batchgen.reporting.findings import Findings
from batchgen.reporting.plots import pace_plots, stage_plots
from batchgen.reporting.spending import Pace, pace
from batchgen.version import VERSION
from batchgen.wording import counted, listed, sized, with_more

_STAGES = {
    "text": "encode prompts",
    "denoise": "denoise",
    "decode": "decode",
    "paint": "paint",
    "write": "write files (all encoder threads)",
}
"""In the order in which they are shown."""


def page(found: Findings) -> str:
    """The HTML text."""
    return str(_template().render(**_context(found)))


def require_libraries() -> None:
    """Raises UsageError where one is missing that pages are made with."""
    missing = [name for name in ("jinja2", "matplotlib") if find_spec(name) is None]
    if missing:
        raise UsageError(
            f"a report is made with {listed(missing)}, which this installation lacks: pip install {' '.join(missing)}"
        )


def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("batchgen.reporting"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_visible,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html")


_PICTURES = {code: chr(0x2400 + code) for code in range(32) if chr(code) not in "\t\n"} | {127: "\u2421"}
"""Of control characters, which HTML cannot hold."""


def _visible(value: object) -> object:
    return value.translate(_PICTURES) if type(value) is str else value


def _context(found: Findings) -> dict[str, Any]:
    from markupsafe import Markup

    script = _asset("page.js")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    known = pace(found.spending)
    stages = {text: s for stage, text in _STAGES.items() if (s := found.spending.stage_s.get(stage, 0.0)) > 0.0}
    return {
        "found": found,
        "version": VERSION,
        "written": f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
        "script": Markup(script),
        "style": Markup(_asset("page.css")),
        "policy": f"default-src 'none'; base-uri 'none'; form-action 'none'; img-src data:; "
        f"style-src 'unsafe-inline'; script-src 'sha256-{digest}'",
        "tiles": list(_tiles(found, known)),
        "notes": list(_notes(found)),
        "pace": known,
        "pace_plots": {kind: Markup(svg) for kind, svg in pace_plots(known).items()} if known else {},
        "break_note": _break_note(known),
        "stage_plots": {kind: Markup(svg) for kind, svg in stage_plots(stages).items()} if stages else {},
        "reasons": sorted(found.rows.reasons.items(), key=lambda one: -one[1].count),
        "groups": tables.groups(found),
        "buckets": tables.buckets(found),
        "captures": tables.captures(found.spending),
        "memory": tables.memory(found.spending),
        "workers": tables.workers(found.spending),
        "labels": found.labels,
        "choices": sorted({card.group for card in found.cards}),
        "versions": {name: ", ".join(sorted(some)) for name, some in sorted(found.spending.versions.items())},
        "job": json.dumps(found.index.job, indent=2, ensure_ascii=False),
        "counted": counted,
    }


def _asset(name: str) -> str:
    return (files("batchgen.reporting") / "templates" / name).read_text(encoding="utf-8")


def _tiles(found: Findings, known: Pace | None) -> Sequence[tuple[str, str, str]]:
    """What a number is of, the number, and the kind of it."""
    plan = found.plan
    tiles = [
        ("images made", f"{plan.made:,}", ""),
        ("failed", f"{plan.failed:,}", "bad" if plan.failed else ""),
        ("rejected", f"{found.index.num_rejected:,}", "bad" if found.index.num_rejected else ""),
        ("outstanding", f"{found.outstanding:,}", "open" if found.outstanding else ""),
    ]
    if known is not None and not found.spending.num_untimed and known.work_s > 1:
        tiles += [
            ("images/s", tables.rate(plan.made / known.work_s), ""),
            ("of work", tables.lasting(known.work_s), ""),
        ]
    return [
        *tiles,
        ("of image files", sized(found.rows.num_bytes), ""),
        ("worker starts", f"{len(found.spending.workers):,}", ""),
    ]


def _notes(found: Findings) -> Sequence[str]:
    """What a person should know of the images, each a sentence."""
    rows, plan = found.rows, found.plan
    notes = [
        (plan.cut, "{} made of prompts that were cut, because the model reads no more (tokens_dropped)"),
        (rows.flat, "{} of one colour (is_flat)"),
        (rows.retried, "{} made again alone after their batch had failed (retries)"),
        (rows.smaller, "{} made in smaller batches than planned, because memory was short"),
    ]
    said = [f"{text.format(counted(number, 'image'))}." for number, text in notes if number]
    lost = [f"Left out, because it cannot be read: {text}" for text in rows.unreadable]
    return [*said, *with_more(lost[: tables.MOST_LINES], len(lost))]


def _break_note(known: Pace | None) -> str:
    if known is None or not known.breaks_s:
        return ""
    times = counted(len(known.breaks_s), "break")
    return f"{times} without any worker, {tables.lasting(known.cut_s)} in all, cut out at the dotted lines."
