"""`csv:FILE[:text=COL,label=COL]`: comma-separated text with column names in the first line; may be gzipped."""

from __future__ import annotations

from bnncli.data.table_files import open_delimited
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form("csv:FILE[:text=COL,label=COL]", 11, "A comma-separated table with column names; may be gzipped.")

_KIND = TableKind("csv", open_delimited)
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
