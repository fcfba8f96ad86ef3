"""The style sheet of the tour's page: one column on a phone, contents beside it on a desk."""

CSS = """
:root { color-scheme: light dark; --ink: #1c2024; --soft: #5b6570; --paper: #ffffff;
  --panel: #f4f5f7; --line: #d9dde2; --accent: #b34700; --ok: #1a7f37; --skipped: #8a6100;
  --failed: #b3261e; }
@media (prefers-color-scheme: dark) { :root { --ink: #e4e7ea; --soft: #9aa4ae; --paper: #14171a;
  --panel: #1e2226; --line: #363c43; --accent: #ff9d5c; --ok: #57c673; --skipped: #e0b040;
  --failed: #ff7b72; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--paper); color: var(--ink);
  font: 16px/1.55 system-ui, -apple-system, "Segoe UI", sans-serif; }
.layout { max-width: 78rem; margin: 0 auto; padding: 1rem; }
main { min-width: 0; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.5rem 0; }
h2 { font-size: 1.3rem; margin: 0 0 0.5rem; }
h3 { font-size: 0.95rem; margin: 1.25rem 0 0.35rem; overflow-wrap: anywhere; }
p { max-width: 46rem; margin: 0.5rem 0; overflow-wrap: break-word; }
a { color: var(--accent); }
nav ol { padding-left: 2rem; margin: 0.5rem 0 1.5rem; }
nav li { margin: 0.15rem 0; }
section { border-top: 1px solid var(--line); margin-top: 1.5rem; padding-top: 1.5rem;
  scroll-margin-top: 0.5rem; }
.meta { color: var(--soft); font-size: 0.9rem; }
.badge { font-size: 0.8rem; font-weight: 600; border: 1px solid; border-radius: 1em;
  padding: 0.05em 0.6em; white-space: nowrap; vertical-align: middle; }
.ok { color: var(--ok); } .skipped { color: var(--skipped); } .failed { color: var(--failed); }
.scroll { overflow-x: auto; border: 1px solid var(--line); border-radius: 6px; }
table { border-collapse: collapse; font-size: 0.88rem; width: 100%;
  font-variant-numeric: tabular-nums; }
th, td { padding: 0.3rem 0.7rem; text-align: left; vertical-align: top;
  border-bottom: 1px solid var(--line); }
tr:last-child td { border-bottom: 0; }
th { background: var(--panel); font-weight: 600; white-space: nowrap; }
td { white-space: nowrap; } td.long { white-space: normal; min-width: 15rem; }
.number { text-align: right; }
pre { margin: 0; overflow: auto; max-height: 30rem; background: var(--panel); padding: 0.75rem;
  border: 1px solid var(--line); border-radius: 6px; font-size: 0.82rem; line-height: 1.45;
  tab-size: 4; }
code, pre { font-family: ui-monospace, "SF Mono", "DejaVu Sans Mono", Menlo, monospace; }
pre.verse { font-family: Georgia, "Times New Roman", serif; font-size: 1.05rem; }
.figures { display: flex; flex-wrap: wrap; gap: 0.5rem; padding: 0; margin: 1rem 0 0;
  list-style: none; }
.figures li { background: var(--panel); border: 1px solid var(--line); border-radius: 6px;
  padding: 0.35rem 0.7rem; font-size: 0.9rem; min-width: 0; overflow-wrap: anywhere; }
.figures b { display: block; font-size: 1rem; }
.chart svg { display: block; width: 100%; max-width: 34rem; height: auto; }
@media (max-width: 40rem) {
  .summary tr { display: grid; grid-template-columns: 1fr auto 5.5rem;
    border-bottom: 1px solid var(--line); }
  .summary th:last-child { display: none; } .summary td { border-bottom: 0; }
  .summary td.long { grid-column: 1 / -1; min-width: 0; padding-top: 0; }
}
@media (min-width: 64rem) {
  .layout { display: grid; grid-template-columns: 14rem minmax(0, 1fr); gap: 0 2.5rem; }
  header { grid-column: 1 / -1; margin-bottom: 1rem; }
  nav { position: sticky; top: 1rem; align-self: start; max-height: 96vh; overflow: auto; }
}
@media print {
  @page { margin: 1.5cm; }
  :root { color-scheme: light; --ink: #000; --soft: #444; --paper: #fff; --panel: #f6f6f6;
    --line: #bbb; --accent: #000; --ok: #000; --skipped: #000; --failed: #000; }
  body { font-size: 10pt; } .layout { display: block; max-width: none; padding: 0; }
  nav { position: static; max-height: none; }
  pre { max-height: none; overflow: visible; white-space: pre-wrap; overflow-wrap: anywhere;
    font-size: 7.5pt; }
  .scroll { overflow: visible; } td { white-space: normal; }
  h2, h3 { break-after: avoid; } tr, .chart, .figures { break-inside: avoid; }
}
"""
