"""One HTML page that needs nothing else: figures are inside it, as SVG."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from offcore.sizes import format_bytes
from offcore.tools.papers.findings import Finding, tally
from offcore.tools.papers.latte.calibrated import ABSOLUTE, held_out, span

STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; margin: 0 auto;
       max-width: 62rem; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.2rem; margin-top: 2.5rem; }
figure { margin: 1.5rem 0; } figure img { width: 100%; height: auto; }
figcaption { color: #444; font-size: .9rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .88rem; width: 100%; }
th, td { text-align: left; padding: .3rem .6rem; border-bottom: 1px solid #ddd; }
th { border-bottom: 2px solid #888; white-space: nowrap; }
td.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.met { color: #00633f; } .missed { color: #a02c00; font-weight: 600; }
.note { border-left: 4px solid #0072B2; padding: .1rem 1rem; background: #f4f8fb; }
"""


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]], numbers: Sequence[int]) -> str:
    """The cells are HTML."""
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{' class=number' * (i in numbers)}>{cell}</td>" for i, cell in enumerate(row)
        )
        + "</tr>\n"
        for row in rows
    )
    table = f"<table><thead><tr>{head}</tr></thead>\n<tbody>{body}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def figures(drawn: Sequence[tuple[str, str, bytes]]) -> str:
    """drawn: (title, caption, SVG)."""
    return "\n".join(
        f'<figure><h3>{escape(title)}</h3><img alt="{escape(title)}: {escape(caption)}" '
        f'src="data:image/svg+xml;base64,{base64.b64encode(svg).decode()}">'
        f"<figcaption>{escape(caption)}</figcaption></figure>"
        for title, caption, svg in drawn
    )


def claims(findings: Sequence[Finding]) -> str:
    """The table of them, as HTML."""

    def cells(one: Finding) -> list[str]:
        plain = (one.key, one.claim, one.published, one.model, one.difference, one.basis)
        kind = {True: "met", False: "missed", None: ""}[one.met]
        return [*map(escape, plain), f'<span class="{kind}">{one.verdict}</span>']

    columns = ("row", "claim", "published", "model", "difference", "basis", "")
    return _table(columns, map(cells, findings), (4,))


def _parameters(part: Mapping[str, Any]) -> str:
    spread = "least" in part["parameters"][0]
    rows = [
        [
            escape(one["name"]),
            escape(one["unit"]),
            escape(one["meaning"]),
            f"{one['value']:g}",
            f"{one['low']:g} - {one['high']:g}",
            *([f"{one['least']:g} - {one['most']:g}"] if spread else []),
        ]
        for one in part["parameters"]
    ]
    columns = ["parameter", "unit", "meaning", "value", "allowed", *(["equally good"] * spread)]
    text = _table(columns, rows, (3, 4, 5))
    if assumed := part.get("assumed"):
        text += f"<p>Assumed: {escape(', '.join(f'{k} {v:g}' for k, v in assumed.items()))}.</p>"
    if stuck := at_limits(part):
        text += f"<p>At the limit of what is allowed: {escape(', '.join(stuck))}.</p>"
    return text


def at_limits(part: Mapping[str, Any]) -> list[str]:
    """Parameters that the fit would take further than it may."""
    return [
        one["name"]
        for one in part["parameters"]
        if min(one["value"] / one["low"], one["high"] / one["value"]) < 1.001
    ]


def _residuals(engines: Mapping[str, Any]) -> str:
    rows = [
        [
            escape(row["key"]),
            escape(f"{row['op']}: {row['claim']}"),
            f"{row['published']:g}",
            f"{row['model']:.2f}",
            f"{100 * row['residual']:+.1f} %",
            span(row["left_out"]),
        ]
        for row in engines["rows"]
    ]
    columns = ("row", "claim", "published", "fitted", "residual", "without the row")
    return _table(columns, rows, (2, 3, 4, 5))


def _told(part: Mapping[str, Any]) -> str:
    """How many numbers of ours stand against how many published ones."""
    free, assumed = len(part["parameters"]), len(part["assumed"])
    return f"{free} parameters and {assumed} assumed constants for {part['numbers']} numbers"


def _spread(engines: Mapping[str, Any]) -> str:
    rows = [
        [
            escape(f"{one['op']} {one['variant']}, {format_bytes(one['bytes'])}"),
            f"{one['fitted']:,.1f}",
            f"{one['least']:,.1f} - {one['most']:,.1f}",
        ]
        for one in engines["equally_good"]["times_us"]
    ]
    return _table(("call", "us", "us, equally good fits"), rows, (1, 2))


def page(
    findings: Sequence[Finding],
    record: Mapping[str, Any],
    drawn: Sequence[tuple[str, str, bytes]],
) -> str:
    """drawn: (title, caption, SVG)."""
    engines = record["engines"]
    shown = figures(drawn)
    equally = engines["equally_good"]["fits"]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>DMA-Latte, reproduced by a model</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>
<body>
<h1>DMA-Latte on 8 x MI300X, reproduced by offcore's model</h1>
<p class="note">No MI300X was measured here. These numbers are a simulator's, whose costs were
fitted to ratios that the paper published; <strong>{escape(ABSOLUTE)}</strong>. RCCL's times are
a curve of two numbers for each collective, fitted too.</p>
<p>Claims met: <strong>{tally(findings)}</strong>; ratios within 15 % (power and KV fetches 20 %),
shares within 5 points, orders and counts exactly. "Fitted": the parameters were fitted to this very
number, so an agreement shows that the model can produce it, not that it predicts it.
Power has {_told(record["power"])}, KV fetches {_told(record["kv"])}.</p>
<p><strong>{escape(held_out(record))}.</strong></p>
<h2>Claims</h2>
{claims(findings)}
<h2>Figures and tables</h2>
{shown}
<h2>Parameters: engines and RCCL's curves</h2>
<p>Fitted by <code>offcore calibrate --seed {record["seed"]} --starts {record["starts"]}</code>.
"Equally good": what {equally} fits from random starts have, whose worst row is as good within a
point.</p>
{_parameters(engines)}
<h2>Residuals of the fit</h2>
<p>"Without the row": what fits of all other rows predict for it, from random starts of their own;
the least and the most among those that are equally good.</p>
{_residuals(engines)}
<h2>What the ratios leave open</h2>
{_spread(engines)}
<h2>Parameters: power</h2>
{_parameters(record["power"])}
<h2>Parameters: KV fetches</h2>
{_parameters(record["kv"])}
<p class="note">The threshold of 4 MB between one engine and several (K3) is the paper's, written
into the machine file. The model does not predict it: by the fitted costs several engines are
faster for 256 copies at every size.</p>
</body></html>
"""
