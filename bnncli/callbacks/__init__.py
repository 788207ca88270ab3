"""Callbacks that fit a posterior when training ends, for Lightning and the Hugging Face Trainer."""
