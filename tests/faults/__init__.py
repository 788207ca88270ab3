"""The fault campaign: every command, with every kind of fault at every call that writes, and with damaged inputs.

`lines` says how each command is run; a command without a line makes a test fail. `shim` makes the faults, `trials` runs a
command with them in a process of its own and says what was wrong afterwards, `mutations` damages inputs. A seeded few of the
trials are in the default suite; all of them run with `pytest -m exhaustive tests/faults`.
"""
