"""A recipe and its study on a small head of random features: every kind of cell, claim and figure."""

from __future__ import annotations

STUDY = """
title = "a small head"
[seconds]
quick = 1
[needs.quick]
arrays = "data/features.npz"
[needs.paper]
arrays = "data/other.npz"
[optional.quick]
more = "data/more.npz"
[settings.quick]
checkpoints = ["one", "two"]
precision = 3
[settings.paper]
checkpoints = ["one"]
precision = 3
[[step]]
command = "extract-features"
from-npz = "$arrays"
ood = ["far"]
[[step]]
name = "g"
command = "fit-laplace"
structure = "kron"
prior-precision = "$precision"
[[step]]
command = "predict"
posterior = ["map", "{g}"]
split = "test"
[[step]]
command = "evaluate"
bootstrap = 50
"""
RECIPE = """
title = "a table"
where = "table 1"
studies = ["small"]
[measure.nll]
step = "evaluate"
value = "rows[name=$each,split=test].metrics[name=nll].value"
error = "rows[name=$each,split=test].metrics[name=nll].standard_error"
each = { map = "map.plug-in", g = "g.mc" }
[[column]]
name = "NLL"
tolerance = 0.1
because = "other data"
cells = [
  { row = "network", published = 100.0, error = 0.1, count = 5, measure = "nll_map" },
  { row = "both", published = 0.0, measure = { published = "nll_g - nll_g", right = "nll_g" } },
  { row = "elsewhere", published = 1.0, unavailable = "it takes a telescope" },
  { row = "more", published = 1.0, measure = "nll_g", needs = ["more"] },
  { row = "not at quick", published = 1.0, measure = "nll_g", not_at = { quick = "other units" } },
]
[[claim]]
id = "positive"
text = "NLL is positive."
where = "section 1"
rule = "nll_map > 0 and nll_g > 0"
[[claim]]
id = "negative"
text = "NLL is below minus one."
where = "section 1"
rule = "nll_map < -1"
[[figure]]
name = "lines"
title = "NLL"
x = [0, 1]
x_label = "number"
y_label = "NLL"
[figure.lines]
"both" = ["nll_map", "nll_g"]
"""
FILES = """
[files]
"data/features.npz" = "features of a small head"
"data/other.npz" = "other features"
"data/more.npz" = "more features"
"""
