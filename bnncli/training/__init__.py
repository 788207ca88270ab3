"""Training of any learner: one loop, one captured step, one way to resume. It knows no posterior, flow or network."""
