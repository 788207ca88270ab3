"""The layout of a posterior's parameters in one flat vector, and their prior."""
