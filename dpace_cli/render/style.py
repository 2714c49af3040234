"""The style sheet of the HTML report: one set of rules, two sets of colours, and paper."""

from __future__ import annotations

from dpace_cli.render.plots import DARK, LIGHT


def _colours(arms: tuple[str, ...], **named: str) -> str:
    named |= {f"arm_{number}": colour for number, colour in enumerate(arms)}
    return "".join(f"--{name.replace('_', '-')}: {colour}; " for name, colour in named.items())


_ON_LIGHT = _colours(
    LIGHT, ink="#1f2937", muted="#5b6472", line="#d9dde3", page="#ffffff", panel="#f5f6f8", link="#00599c",
    warn="#8a4b00", warn_panel="#fff6e8",
)  # fmt: skip
_ON_DARK = _colours(
    DARK, ink="#e6e9ee", muted="#a6afbd", line="#363d49", page="#14171c", panel="#1d2129", link="#7cc4ff",
    warn="#ffc46b", warn_panel="#2a2115",
)  # fmt: skip

_RULES = """
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body {
  margin: 0 auto; max-width: 72rem; padding: 2.5rem 1.25rem 4rem;
  background: var(--page); color: var(--ink); font-variant-numeric: tabular-nums;
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif;
}
h1, h2 { line-height: 1.2; text-wrap: balance; letter-spacing: -0.011em; }
h1 { font-size: 2rem; margin: 0.2rem 0 0.6rem; }
h2 { font-size: 1.35rem; margin: 0 0 0.5rem; }
p { max-width: 46rem; margin: 0.5rem 0; }
a { color: var(--link); text-underline-offset: 0.18em; }
:focus-visible { outline: 3px solid var(--link); outline-offset: 3px; border-radius: 3px; }
main:focus { outline: none; }
.skip { position: absolute; left: -999rem; }
.skip:focus { left: 1rem; top: 1rem; background: var(--page); padding: 0.5rem 0.8rem; z-index: 1; }
.brand { margin: 0; color: var(--muted); font-size: 0.85rem; letter-spacing: 0.04em; }
.summary { font-size: 1.1rem; }
nav ul {
  display: flex; flex-wrap: wrap; gap: 0.25rem 1.25rem; list-style: none; margin: 1.25rem 0 2rem;
  padding: 0.7rem 0; border-block: 1px solid var(--line); font-size: 0.92rem;
}
section { margin: 3.25rem 0; }

.keys {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem;
  list-style: none; margin: 0; padding: 0;
}
.keys li {
  background: var(--panel); border-radius: 0.6rem; padding: 1rem 1.15rem;
  display: flex; flex-direction: column;
}
.keys .label, .keys .detail { color: var(--muted); font-size: 0.88rem; }
.keys .value { font-size: 1.9rem; font-weight: 650; line-height: 1.25; letter-spacing: -0.02em; }
.cautions {
  margin: 1.5rem 0; padding: 0.9rem 1.15rem; background: var(--warn-panel);
  border-left: 4px solid var(--warn); border-radius: 0.35rem;
}
.cautions h2 { font-size: 1rem; color: var(--warn); margin: 0 0 0.25rem; }
.cautions ul { margin: 0; padding-left: 1.1rem; }

.scroll { overflow-x: auto; margin: 1.5rem 0 0.5rem; }
table { border-collapse: collapse; font-size: 0.9rem; line-height: 1.4; }
caption { text-align: left; font-weight: 600; padding-bottom: 0.5rem; font-size: 1rem; }
caption span { display: inline-block; width: max-content; max-width: min(60rem, calc(100vw - 2.5rem)); }
th, td { padding: 0.3rem 0.8rem 0.3rem 0; text-align: right; white-space: nowrap; vertical-align: baseline; }
th:last-child, td:last-child { padding-right: 0.2rem; }
thead th { color: var(--muted); font-weight: 500; border-bottom: 1px solid var(--line); vertical-align: bottom; }
thead th.group { text-align: center; color: var(--ink); font-weight: 600; padding-left: 0.9rem; }
thead th[scope="col"]:not(.number), tbody th { text-align: left; }
tbody th { font-weight: 400; white-space: normal; min-width: 3.5rem; }
tbody tr + tr > * { border-top: 1px solid color-mix(in srgb, var(--line) 60%, transparent); }
tbody tr:hover { background: var(--panel); }
.note { color: var(--muted); font-size: 0.85rem; margin: 0.2rem 0; text-wrap: pretty; }

figure { margin: 2rem 0; }
figcaption { font-weight: 600; margin-bottom: 0.6rem; }
.plot { display: block; width: 100%; max-width: 46rem; height: auto; font-family: inherit; }
summary { cursor: pointer; color: var(--link); font-size: 0.9rem; width: max-content; margin-top: 0.4rem; }

footer { margin-top: 4rem; padding-top: 1.5rem; border-top: 1px solid var(--line); font-size: 0.9rem; }
footer h2 { font-size: 1rem; }
dl { margin: 0; }
dl div { display: flex; gap: 1rem; padding: 0.15rem 0; }
dt { color: var(--muted); flex: 0 0 11rem; }
dd { margin: 0; overflow-wrap: anywhere; }
@media (max-width: 36rem) {
  h1 { font-size: 1.6rem; }
  dl div { flex-direction: column; gap: 0; }
  dt { flex-basis: auto; }
}
"""

_PRINT = """
  body { max-width: none; padding: 0; font-size: 10pt; }
  nav, .skip, summary { display: none; }
  section, footer { margin: 1.5rem 0; }
  figure, tr, .keys, .cautions { break-inside: avoid; }
  h2, figcaption, caption { break-after: avoid; }
  .scroll { overflow: visible; }
  .plot { max-width: 14cm; max-height: 21cm; }
  figure > .note { display: none; }
  table { font-size: 8pt; }
  th, td { padding-right: 0.5rem; }
  details::details-content { content-visibility: visible; }
  a { color: inherit; text-decoration: none; }
"""

STYLE = (
    f":root {{ color-scheme: light dark; {_ON_LIGHT}}}\n"
    f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {_ON_DARK}}} }}\n"
    f"{_RULES}\n@media print {{{_PRINT}}}\n"
)
