"""`conll:FILE[:label=COL]`: one word and its tags per line, an empty line between texts; may be gzipped."""

from __future__ import annotations

from bnncli.data.table_files import open_conll
from bnncli.data.tables import TableKind
from bnncli.options.declaration import Form

FORM = Form(
    "conll:FILE[:label=COL]", 17, "One word and its tags per line, and an empty line between texts (CoNLL, CoNLL-U)."
)

_KIND = TableKind("conll", open_conll, takes="words")
exists, files, open_dataset = _KIND.exists, _KIND.files, _KIND.open_dataset
