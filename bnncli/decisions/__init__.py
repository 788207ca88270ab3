"""Decisions with guarantees, calibrated on examples that chose nothing else: prediction sets, acceptance, outliers, shift.

Arrays in, rules and decisions out; nothing here knows a file. Each guarantee holds where the examples decided on are exchangeable
with those calibrated on, whatever the predictions are; under shift it does not, and the alarm is what tells.
"""

SETS, RISK, OOD, SHIFT = KINDS = (
    "sets",
    "risk",
    "ood",
    "shift",
)  # of rules, which are called so where nothing else is said
LAC, APS, RAPS = SCHEMES = ("lac", "aps", "raps")  # of prediction sets
