"""The style sheet of the report."""

STYLE = """
body{font:14px/1.45 system-ui,-apple-system,"Segoe UI","DejaVu Sans",sans-serif;color:#1c2733;
background:#fff;margin:0 auto;max-width:1160px;padding:20px}
h1{font-size:24px;margin:0 0 2px} h2{font-size:16px;margin:26px 0 8px}
.sub{color:#5b6875;margin:0 0 14px}
.badge{display:inline-block;border-radius:5px;padding:1px 9px;color:#fff;font-size:15px;
vertical-align:3px;margin-left:8px} .done{background:#2e7d32} .aborted{background:#b3261e}
.going{background:#5b6875}
.tiles{display:flex;flex-wrap:wrap;gap:10px;margin:12px 0}
.tile{border:1px solid #d8dee5;border-radius:7px;padding:8px 14px;min-width:118px}
.tile b{display:block;font-size:21px} .tile span{color:#5b6875;font-size:12.5px}
.tile.hot{border-color:#e5484d;background:#fff4f4}
.why{border-left:5px solid #d93025;background:#fff4f4;padding:9px 14px;border-radius:0 6px 6px 0}
.why p{margin:3px 0}
svg{width:100%;height:auto;display:block} svg text{font-size:11.5px;fill:#3c4956}
svg .strong{font-weight:700;font-size:12.5px} svg .label{font-size:12px;fill:#1c2733}
svg .role{font-size:11px;fill:#5b6875} svg .joiner{fill:#2f6db5;font-weight:700}
svg .leaver{fill:#8e5fa8;font-weight:700}
svg .inbar{font-size:11px;fill:#1c2733} svg .light{fill:#fff} svg .failedtext{fill:#b3261e;
font-weight:700}
svg .grid{stroke:#e4e9ee;stroke-width:1} svg .pause{opacity:.22} svg .pausetext{fill:#b3261e;
font-weight:700;font-size:12.5px}
svg .tokens{fill:#4f9dd9;opacity:.75} svg .axisname{font-weight:600;fill:#1c2733}
.legend{display:flex;flex-wrap:wrap;gap:4px 14px;font-size:12.5px;margin:4px 0 0}
.legend i{display:inline-block;width:12px;height:12px;border-radius:2px;margin-right:5px;
vertical-align:-1px}
table{border-collapse:collapse;margin:4px 0} th,td{padding:3px 14px 3px 0;text-align:left;
border-bottom:1px solid #e4e9ee;vertical-align:top}
th{font-weight:600;color:#5b6875;font-size:12.5px}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums} tr.bad td{color:#b3261e}
.meter{display:inline-block;height:9px;background:#f08a24;border-radius:2px;vertical-align:1px}
details summary{cursor:pointer;margin:20px 0 6px;font-weight:600;font-size:16px}
.note{color:#5b6875;font-size:12.5px}
"""
