"""Post-hoc Bayesian classifiers from saved checkpoints: the package behind the `bnncli` command."""

__version__ = "0.1.0"
