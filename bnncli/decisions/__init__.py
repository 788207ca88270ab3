"""Decisions with finite-sample guarantees: prediction sets, selective prediction, outlier detection, shift alarms.

Each rule is calibrated on held-out examples. Its guarantee holds for any predictions as long as new examples are
exchangeable with the calibration examples. Under shift it does not hold; the shift alarm detects that. Functions take
and return arrays and know no files.
"""

SETS, RISK, OOD, SHIFT = KINDS = (
    "sets",
    "risk",
    "ood",
    "shift",
)  # kinds of rules, also the default names of rules
LAC, APS, RAPS = SCHEMES = ("lac", "aps", "raps")  # schemes of prediction sets
