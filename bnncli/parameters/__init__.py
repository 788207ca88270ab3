"""How the parameters of a posterior lie in one flat vector, and their prior."""
