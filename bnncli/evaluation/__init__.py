"""How good predictions, draws and chains are: scores, calibration, detection, discrepancy, convergence."""
