"""The parts of gpu.py: what a part measures goes to a ledger, which knows what was asked and says what is missed."""
