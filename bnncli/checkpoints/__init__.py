"""Saved models of others, read without running any of their code."""
