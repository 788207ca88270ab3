"""`parquet:FILE-or-DIR[:text=COL,label=COL]`: Parquet tables, or a pattern such as `DIR/train-*.parquet`."""

from __future__ import annotations

from bnncli.data.table_files import open_parquet
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form("parquet:FILE-or-DIR[:text=COL,label=COL]", 14, "Parquet tables.")

_KIND = TableKind("parquet", open_parquet, (".parquet", ".pq"))
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
