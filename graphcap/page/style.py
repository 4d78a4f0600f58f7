"""The page's style sheet: light and dark, from a phone to a wide window; no font or file from elsewhere."""

CSS = """
:root{color-scheme:light dark;--page:#fff;--box:#f5f6f8;--ink:#1c1f24;--muted:#5a626d;--grid:#d9dde3;
--before:#c8553d;--after:#1f7a4d;--reference:#8a93a0;--on-fill:#fff;--warn:#9a4a00;
--series-0:#2d6cb5;--series-1:#b4500f;--series-2:#1d7d68;--series-3:#8a4fa3;--series-4:#66707d;
--series-5:#a3273f;--series-6:#4b6a12;--series-7:#0f7392;--series-8:#8c5a2b;--series-9:#5b55b8}
@media (prefers-color-scheme:dark){:root{--page:#14171c;--box:#1d2128;--ink:#e8eaee;--muted:#a2abb8;
--grid:#39404b;--before:#f08a70;--after:#56c98e;--reference:#808b99;--on-fill:#101318;--warn:#f0b070;
--series-0:#7fb2ec;--series-1:#f0a05e;--series-2:#62c9b0;--series-3:#c99be0;--series-4:#a8b0bb;
--series-5:#f08598;--series-6:#a6c75a;--series-7:#62c4e0;--series-8:#d3a678;--series-9:#a9a4f5}}
*{box-sizing:border-box}
html{-webkit-text-size-adjust:100%;text-size-adjust:100%}
body{margin:0 auto;max-width:800px;padding:16px;background:var(--page);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Noto Sans",sans-serif;overflow-wrap:anywhere}
h1{font-size:1.5rem;line-height:1.25;margin:.4em 0}
h2{font-size:1.15rem;margin:2.2em 0 .6em;padding-top:.8em;border-top:1px solid var(--grid)}
h3{font-size:1rem;margin:1.4em 0 .4em}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(140px,1fr));gap:10px;margin:1em 0}
.tile{background:var(--box);border-radius:8px;padding:10px 12px}
.tile b{display:block;font-size:1.2rem;line-height:1.3;font-variant-numeric:tabular-nums}
.tile span,.note,small,.source{color:var(--muted);font-size:.875rem}
.note{margin:.6em 0}
.absent{color:var(--warn);font-size:.875rem;margin:.6em 0}
.scroll{overflow-x:auto;margin:.8em 0}
table{border-collapse:collapse;width:100%;font-size:.875rem}
th,td{text-align:left;vertical-align:top;padding:5px 12px 5px 0;border-bottom:1px solid var(--grid)}
th:last-child,td:last-child{padding-right:0}
th{color:var(--muted);font-weight:600;vertical-align:bottom}
th:empty{padding:0}
td:not(.n){min-width:7.2em}
.n+.n{min-width:3em}
td b{font-weight:600}
small{display:block;line-height:1.3}
.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;overflow-wrap:normal}
th.n{white-space:normal}
tfoot td{font-weight:600}
i{display:inline-block;width:.75em;height:.75em;border-radius:2px;margin-right:.45em}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:2px 16px;margin:.2em 0 .8em;padding:0;
color:var(--muted);font-size:.875rem}
.chart{margin:.8em 0}
.chart svg{display:block;width:100%;height:auto}
.chart text{font-family:inherit}
.chart svg *{stroke-linejoin:round;stroke-linecap:butt}
.narrow{display:none}
summary{cursor:pointer;color:var(--muted);font-size:.875rem;padding:.4em 0}
@media (max-width:600px){table{font-size:.78rem}th,td{padding-right:6px}.n+.n{min-width:0}}
@media (max-width:600px){.wide{display:none}.narrow{display:block}body{padding:12px}}
"""
