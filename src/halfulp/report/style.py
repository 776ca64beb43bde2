"""The style sheet of every page: one column on a phone, pictures side by side on a desk, black on
white in print.
"""

CSS = """
:root { color-scheme: light dark; --ink: #1b1b1d; --soft: #5c5c61; --ground: #fdfdfb; --panel: #f4f4f0; --line: #dcdcd6;
  --grid: #d9d9d6; --link: #0a5a94; --good: #00634a; --warn: #8a5a00; --bad: #a83c00;
  --good-ground: #e0f3ec; --warn-ground: #fbefd5; --bad-ground: #fbe5da; }
@media (prefers-color-scheme: dark) { :root { --ink: #e8e8e6; --soft: #a6a6a4; --ground: #17181a; --panel: #202225;
  --line: #37393d; --grid: #3c3e42; --link: #7cc0f0; --good: #6fd3b0; --warn: #efc065; --bad: #ff9d6b;
  --good-ground: #12342a; --warn-ground: #3a2e12; --bad-ground: #43230f; } }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; max-width: 64rem; padding: 2.2rem 1.25rem 4rem; background: var(--ground); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
header, section, footer { margin-bottom: 3rem; }
h1 { font-size: clamp(1.65rem, 4.5vw, 2.4rem); line-height: 1.15; letter-spacing: -0.015em; margin: 0 0 0.7rem; }
h2 { font-size: 1.45rem; line-height: 1.25; margin: 0 0 0.6rem; padding-top: 0.9rem; border-top: 2px solid var(--ink); }
h3 { font-size: 1.05rem; margin: 2rem 0 0.5rem; }
p, ul, ol { max-width: 44rem; margin: 0.6rem 0; }
ul, ol { padding-left: 1.3rem; } li { margin: 0.3rem 0; }
a { color: var(--link); }
.lead { font-size: 1.15rem; max-width: 46rem; }
h3 + .note { margin-top: 0; }
.meta, figcaption, .note { color: var(--soft); font-size: 0.86rem; }
.meta { margin-top: 1rem; }
.finding { font-size: 1.1rem; font-weight: 550; max-width: 46rem;
  padding-left: 0.9rem; border-left: 4px solid var(--ink); }
nav ol { list-style: none; padding: 0; max-width: none; border-top: 1px solid var(--line); margin-top: 1.6rem; }
nav li { margin: 0; padding: 0.55rem 0; border-bottom: 1px solid var(--line); }
nav a { font-weight: 650; text-decoration: none; margin-right: 0.5rem; white-space: nowrap; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: 1.6rem 1.4rem;
  margin: 1.4rem 0 0.8rem; }
figure { margin: 0; max-width: 33rem; } figure svg { display: block; width: 100%; height: auto; }
figure.sheet { max-width: none; margin: 1.2rem 0; } figure.sheet img { max-width: 100%; height: auto; }
figure h3 { margin: 0 0 0.3rem; }
figcaption { margin-top: 0.3rem; }
.scroll { overflow-x: auto; margin: 0.6rem 0 0.8rem; }
.scroll:focus-visible { outline: 2px solid var(--link); }
table { border-collapse: collapse; font-size: 0.9rem; line-height: 1.4; min-width: 100%; }
th, td { text-align: left; vertical-align: top; padding: 0.4rem 0.9rem 0.4rem 0; border-bottom: 1px solid var(--line); }
thead th { font-weight: 650; border-bottom: 1.5px solid var(--soft); vertical-align: bottom; }
tbody th { font-weight: 600; }
td.number, thead th.number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
.short { white-space: nowrap; }
td.wide { min-width: 15rem; } th.wide { min-width: 9rem; }
.badge { display: inline-block; padding: 0.02rem 0.5rem; border-radius: 0.7rem; font-weight: 650; white-space: nowrap; }
.good { color: var(--good); background: var(--good-ground); }
.warn { color: var(--warn); background: var(--warn-ground); }
.bad { color: var(--bad); background: var(--bad-ground); }
.none { color: var(--soft); background: var(--panel); }
pre { background: var(--panel); padding: 0.8rem 1rem; border-radius: 0.4rem; overflow-x: auto; font-size: 0.82rem;
  line-height: 1.45; }
code, pre { font-family: ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
code { font-size: 0.92em; overflow-wrap: anywhere; } pre code { font-size: inherit; overflow-wrap: normal; }
.command { margin: 0.4rem 0; font-size: 0.86rem; color: var(--soft); }
.command code { color: var(--ink); background: var(--panel); padding: 0.1rem 0.4rem; border-radius: 0.3rem; }
details { margin: 1rem 0; } summary { cursor: pointer; font-weight: 600; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 0.25rem 1.2rem; max-width: 46rem; margin: 0.8rem 0; }
dt { color: var(--soft); } dd { margin: 0; overflow-wrap: anywhere; }
footer { border-top: 1px solid var(--line); padding-top: 0.8rem; margin-bottom: 0; }
@media (max-width: 34rem) {
  body { padding: 1.3rem 1rem 3rem; } dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 0.5rem; }
  nav a { display: block; white-space: normal; }
}
@media print {
  :root { --ink: #000; --soft: #444; --ground: #fff; --panel: #f4f4f4; --line: #bbb; --grid: #ccc; --link: #000;
    --good: #00634a; --warn: #7a5000; --bad: #a83c00; color-scheme: light; }
  body { max-width: none; padding: 0; font-size: 10pt; } .scroll { overflow: visible; } a { text-decoration: none; }
  figure, tr, pre, .finding { break-inside: avoid; } h2, h3, .note { break-after: avoid; }
  .figures { grid-template-columns: 1fr 1fr; } pre { white-space: pre-wrap; } .badge { border: 1px solid currentColor; }
  table { font-size: 8.5pt; } td.wide, th.wide { min-width: 0; } .short { white-space: normal; }
  pre { font-size: 7.5pt; } @page { margin: 16mm; }
}
""".strip()
