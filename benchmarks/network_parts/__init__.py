"""The experiments of whole_networks.py, a file each.

A part is a file of this folder (none whose name begins with `_`); its name on the command line is the file's with - for _.
It has `run(bench: Bench) -> list[Table]` (see `_bench.py`, `_table.py`): all posteriors through `bench.folder(...).bnncli(...)`,
data from `bench.data(...)`, fewer rows and draws where `bench.is_quick`. It prints nothing: the tables are printed for it.
It raises `LeftOut` where what it needs is not installed or not at hand.
"""
