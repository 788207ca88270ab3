"""Evaluation of predictions, draws and chains: scores, calibration, detection, discrepancy, convergence."""
