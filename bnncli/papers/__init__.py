"""Published experiments: recipes in plain Python, the runner of `bnncli reproduce`, and toy experiments that no command expresses.

`recipe.py` says what a recipe declares; `numbers.py` has formulas of measured numbers; `runner.py` and `jobs.py` run the parts of recipes;
`results.py` judges and writes. `refinement.py`, `lbbnn.py`, `bridge.py` and `beyond.py` are the works, with one function for each table or
figure. `studies.py` has the grids of commands that they read. The toy experiments, which import torch, lie in `*_toys.py` and
`bridge_digits.py`.
"""

SCALES = ("quick", "paper")
PUBLISHED, RIGHT, BOTH = "published", "right", "both"  # definitions of what is measured
