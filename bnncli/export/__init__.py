"""Prediction with a posterior over the last layer as plain torch: what export writes, and what runs where there is no bnncli.

A posterior and an integrator become tensors and a list of steps (`parts`); each step is a function of tensors by name (`steps`),
whose source is also the code that goes with a file of tensors. Whatever is the same for all inputs is folded into the tensors.
"""

MARK = '"""Written by bnncli.'  # what the module that goes with a file of tensors begins with
