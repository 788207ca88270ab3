"""`arrow:FILE-or-DIR[:text=COL,label=COL]`: Arrow or Feather tables, or a pattern such as `DIR/train-*.arrow`."""

from __future__ import annotations

from bnncli.data.table_files import open_arrow
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form("arrow:FILE-or-DIR[:text=COL,label=COL]", 15, "Arrow or Feather tables.")

_KIND = TableKind("arrow", open_arrow, (".arrow", ".feather", ".ipc"))
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
