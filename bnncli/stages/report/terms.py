"""Technical terms of a report: explained at the page's end, and linked from the verdict."""

from __future__ import annotations

import re

from bnncli.figures.pages import Block, Markup, element, joined

SECTION = "terms"
TERMS = {
    "accuracy": "The share of examples whose most probable class is right.",
    "AUROC": "The probability that a score ranks a known input above an outlier. 0.5 is chance, 1 is perfect.",
    "Brier": "The mean squared error of the probabilities. Lower is better.",
    "ECE": "Expected calibration error: the mean gap between stated confidence and accuracy, over bins of confidence. "
    "A calibrated model scores above 0 by chance; the floor says by how much.",
    "ELBO": "Evidence lower bound, in nats: how close an approximation is to the exact posterior, up to a constant. Higher is better.",
    "FPR95": "The share of outliers accepted when 95% of known inputs are accepted. Lower is better.",
    "log-weight sd": "The spread of the log ratio between the exact posterior and an approximation. Below 2, the approximation can be trusted.",
    "MMD^2": "A squared distance between two sets of draws. A p-value that is not small means that they cannot be told "
    "apart; with many draws, even a tiny distance has a small p-value.",
    "mutual information": "How much draws of the posterior disagree about the label of an input.",
    "NLL": "Negative log likelihood of the labels, in nats per example. It judges probabilities as a whole. Lower is better.",
    "Pareto k": "The tail index of importance weights. Below 0.7 (lower with few draws), an approximation covers the tails "
    "of the exact posterior.",
    "posterior": "The distribution of the weights given the training data; also a file that represents it: laplace is a Gaussian, refine a Gaussian bent by a flow, hmc draws by Hamiltonian Monte Carlo.",
    "R-hat": "How well the chains of a sampler agree. 1 is perfect, and values up to 1.05 are accepted.",
    "temperature scaling": "One number divides all logits. It changes confidence, never the predicted class.",
    "95% interval": "A range that contains the true value for 95% of test sets.",
}
_FOUND = re.compile("|".join(rf"(?<![\w-]){re.escape(term)}(?![\w-])" for term in sorted(TERMS, key=len, reverse=True)))


def linked(text: str) -> Markup:
    """A text whose terms link to their explanations, each once."""
    parts: list[str] = []
    place, seen = 0, set()
    for found in _FOUND.finditer(text):
        if found[0] not in seen:
            seen.add(found[0])
            parts += [text[place : found.start()], element("a", found[0], href=f"#{_name(found[0])}", class_="term")]
            place = found.end()
    return joined(*parts, text[place:])


def terms() -> list[Block]:
    """The section."""
    items = [joined(element("dt", term, id=_name(term)), element("dd", text)) for term, text in TERMS.items()]
    return [element("dl", *items)]


def _name(term: str) -> str:
    return f"term-{re.sub(r'[^a-z0-9]+', '-', term.lower())}"
