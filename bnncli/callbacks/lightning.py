"""A callback of Lightning that fits a posterior when training ends."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from bnncli.callbacks.fitting import PosteriorFit

if TYPE_CHECKING:
    from lightning.pytorch import Callback
else:

    def _find_callback() -> type:
        """Return the Callback of the package that is in use; `lightning` and `pytorch_lightning` each have one."""
        names = sorted(("lightning.pytorch", "pytorch_lightning"), key=lambda name: name not in sys.modules)
        for name in names:
            if importlib.util.find_spec(name.partition(".")[0]) is not None:
                return importlib.import_module(name).Callback
        raise ImportError("bnncli.callbacks.lightning needs Lightning: pip install 'bnncli[lightning]'")

    Callback = _find_callback()


class FitPosterior(PosteriorFit, Callback):
    __doc__ = f"""{PosteriorFit.__doc__}
    The module's `forward` returns logits. The scores go to all loggers of the trainer, from the process of rank zero."""

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Fit the posterior, with checkpoints already saved, and log its scores."""
        if not trainer.is_global_zero or trainer.fast_dev_run:
            return
        before, device = pl_module.device, trainer.strategy.root_device  # Lightning has moved the module to the CPU
        with self.tolerate():
            train = trainer.train_dataloader if self.train is None else self.train
            val = trainer.val_dataloaders if self.val is None else self.val
            try:
                pl_module.to(device)
                scores = self.fit(pl_module, train, val, device=str(device))
            finally:
                pl_module.to(before)
            for logger in trainer.loggers:
                logger.log_metrics(scores, step=trainer.global_step)
