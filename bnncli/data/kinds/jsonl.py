"""`jsonl:FILE[:text=COL,label=COL]`: one JSON object per line; may be gzipped."""

from __future__ import annotations

from bnncli.data.table_files import open_json_lines
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form("jsonl:FILE[:text=COL,label=COL]", 13, "One JSON object per line; may be gzipped.")

_KIND = TableKind("jsonl", open_json_lines)
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
