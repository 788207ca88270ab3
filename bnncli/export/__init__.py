"""Export prediction with a last-layer posterior as plain torch, to run without bnncli.

A posterior and an integrator become tensors and a list of steps (`parts`). Each step is a function of named tensors
(`steps`), and its source is also the code shipped with a file of tensors. Everything that does not depend on the
inputs is folded into the tensors.
"""

MARK = '"""Written by bnncli.'  # start of the module shipped with a file of tensors
