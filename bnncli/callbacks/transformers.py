"""A callback of the Hugging Face Trainer that fits a posterior when training ends."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

from torch.utils.data import DataLoader, Dataset

from bnncli.api.run import BATCH_SIZE
from bnncli.callbacks.fitting import PosteriorFit

if importlib.util.find_spec("transformers") is None:
    raise ImportError("bnncli.callbacks.transformers needs transformers: pip install 'bnncli[hf]'")

from transformers import TrainerCallback
from transformers.trainer_callback import CallbackHandler


class FitPosterior(PosteriorFit, TrainerCallback):
    __doc__ = f"""{PosteriorFit.__doc__}
    The scores go to the log history and to what `report_to` names, as those of `Trainer.log`. With load_best_model_at_end, the
    posterior is that of the best model."""

    _handler: CallbackHandler | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Move in front of the reporting callbacks, some of which end their run when training ends."""
        caller = sys._getframe(1).f_locals.get("self")  # callbacks are not told what calls them
        if isinstance(caller, CallbackHandler) and self in caller.callbacks:
            self._handler = caller
            caller.callbacks.sort(key=lambda one: one is not self)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Fit the posterior and log its scores."""
        handler, self._handler = self._handler, None
        if not state.is_world_process_zero:
            return
        with self.tolerate():
            loader = kwargs["train_dataloader"]
            train = loader if self.train is None else _load_like(loader, self.train)
            val = kwargs["eval_dataloader"] if self.val is None else _load_like(loader, self.val)
            scores = self.fit(kwargs["model"], train, val, device=str(args.device))
            state.log_history.append({**scores, "step": state.global_step})
            if handler is not None:
                handler.on_log(args, state, control, scores)


def _load_like(loader: DataLoader, data: Any) -> Any:
    """Return a loader of a data set, or list of examples, with the columns and collation of another loader; other data as given."""
    if hasattr(data, "select_columns") and hasattr(loader.dataset, "column_names"):
        data = data.select_columns(loader.dataset.column_names)
    elif not isinstance(data, Dataset | list):
        return data
    return DataLoader(data, loader.batch_size or BATCH_SIZE, collate_fn=loader.collate_fn)
