"""The look of the preview page: light and dark, from a telephone to a wide screen."""

from __future__ import annotations

PAGE_STYLE = """
:root { color-scheme:light dark; --ink:#1d2430; --soft:#5d6878; --line:#dfe4ea; --page:#f6f8fa; --card:#fff;
  --on:#cdeed6; --on-edge:#8fd3a3; --tag:#7a4fb3; --cut:#c9d1db }
@media (prefers-color-scheme:dark) { :root { --ink:#e4e9f0; --soft:#93a0b2; --line:#2c3644; --page:#11161d; --card:#182029;
  --on:#17492b; --on-edge:#2f8350; --tag:#c6a5f3; --cut:#3a4656 } }
* { box-sizing:border-box }
body { margin:0 auto; max-width:1080px; padding:28px 24px 60px; background:var(--page); color:var(--ink);
  font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif; overflow-wrap:anywhere }
h1 { font-size:22px; margin:0 0 4px }
h2 { font-size:16px; margin:32px 0 10px } h2 small { color:var(--soft); font-weight:400; margin-left:8px }
p { margin:4px 0; color:var(--soft) } code { color:var(--ink) }
.figures { display:flex; flex-wrap:wrap; gap:10px 28px; margin:14px 0 }
.figures div { min-width:0 } dt { color:var(--soft); font-size:12px } dd { margin:0; font-weight:600 }
.legend { display:flex; flex-wrap:wrap; gap:4px 22px; font-size:13px }
.scroll { overflow-x:auto }
table { border-collapse:collapse; font-variant-numeric:tabular-nums; margin:14px 0; white-space:nowrap }
th,td { text-align:right; padding:4px 18px 4px 0; border-bottom:1px solid var(--line); font-weight:400 }
th { color:var(--soft); font-size:13px }
.bar,th:last-child { width:180px; text-align:left } .bar s { display:block;
  height:9px; border-radius:2px; background:var(--on-edge) }
article { background:var(--card); border:1px solid var(--line); border-radius:8px; margin:10px 0; padding:10px 14px }
header { display:flex; gap:4px 14px; flex-wrap:wrap; color:var(--soft); font-size:13px; margin-bottom:6px }
header strong { color:var(--ink) }
pre { margin:0; white-space:pre-wrap; overflow-wrap:anywhere; font:13px/1.65 ui-monospace,SFMono-Regular,Menlo,monospace }
pre i,pre b,.legend i,.legend b { font-style:normal; font-weight:400; unicode-bidi:isolate; border-left:1px solid var(--cut) }
b { color:var(--tag) } u { text-decoration:none; color:var(--soft); opacity:.75 }
mark { background:var(--on); color:inherit; box-shadow:inset 0 -1px 0 var(--on-edge) }
mark i,mark b { border-left-color:var(--on-edge) }
.legend i,.legend b { padding:0 4px } .legend mark { padding:1px 2px; margin-right:4px }
.gap { text-align:center; font-size:12px; padding:6px; margin:8px 0; border:dashed var(--line); border-width:1px 0 }
@media (max-width:600px) {
  body { padding:16px 10px 40px } article { padding:8px 10px } pre { font-size:12px }
  th,td { padding-right:12px } .bar,th:last-child { display:none } }
"""
