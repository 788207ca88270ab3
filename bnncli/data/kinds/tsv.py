"""`tsv:FILE[:text=COL,label=COL]`: tab-separated text with column names in the first line; may be gzipped."""

from __future__ import annotations

from functools import partial

from bnncli.data.table_files import open_delimited
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form("tsv:FILE[:text=COL,label=COL]", 12, "A tab-separated table with column names; may be gzipped.")

_KIND = TableKind("tsv", partial(open_delimited, delimiter="\t"))
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
