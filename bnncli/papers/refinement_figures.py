"""Figures of the refinement paper: integrals and toy posteriors (2, 4, 5, 6), flows by length (7), shifts (8), marginals (9 to 11)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from bnncli.papers.numbers import Formula, Inequality, all_of, mean
from bnncli.papers.recipe import Claim, Experiment, LineFigure, MarginalFigure, Results, Row, Study, column
from bnncli.papers.refinement import LENGTHS, MMD, REFINED, against_length, constant, predictions, refinement
from bnncli.papers.studies import (
    ANGLES,
    CORRUPTIONS,
    QUICK_CORRUPTIONS,
    SEVERITIES,
    cifar10_corruptions,
    cifar10_last_layer,
    cifar100_last_layer,
    fmnist_last_layer,
    fmnist_rotations,
    reviews_last_layer,
)

# Integrals and toy posteriors.


@refinement.recipe(
    "figure-2",
    title="Figure 2: errors of Monte Carlo and of the probit approximation",
    where="figure 2 and section 3.1",
    note=(
        "The grid is not given. Ours has 80 standard deviations up to 10 and 81 means in [-10, 10]; the largest error of "
        "Monte Carlo is a maximum over all cells and grows with their number: it says how unlucky one of them is, and is "
        "no standard error, which is at most 0.5 / sqrt(S)."
    ),
    experiment=Experiment("refinement_toys", "integral-errors"),
    settings={"limit": 10, "cells": 80, "repeats": 5},
    quick={"samples": [100, 10000]},
    paper={"samples": [10, 30, 100, 1000, 10000, 100000]},
    seconds={"quick": 3, "paper": 60},
)
def figure_2(results: Results) -> Iterator[Row]:
    yield from column(
        "largest error",
        [("Monte Carlo, S = 100", 0.18, results["mc_max_100"])],
        tolerance=0.025,
        because=(
            "the published grid, on which a largest error depends, is not given: on grids of 80 x 81 cells up to 5, 10 "
            "and 20 it is .14, .16 and .17"
        ),
    )
    yield Claim(
        "few draws are inaccurate",
        "With 100 draws the largest error of Monte Carlo is larger than that of the probit approximation.",
        results["mc_max_100"] > results["probit_max"],
        "section 3.1",
    )
    yield Claim(
        "many draws overtake",
        "From 10,000 draws on Monte Carlo is better than the probit approximation, on average.",
        results["mc_mean_10000"] < results["probit_mean"],
        "section 3.1",
    )
    yield Claim(
        "many draws overtake at worst",
        "From 10,000 draws on the largest error of Monte Carlo is below that of the probit approximation as well.",
        results["mc_max_10000"] < results["probit_max"],
        "section 3.1",
    )


@refinement.recipe(
    "figure-4",
    title="Figure 4: uncertainty of a regression network by Monte Carlo and by linearisation",
    where="figure 4 and section 3.3",
    note=(
        "Data, width and prior are not given. Ours: 40 examples of sin(2 x) in [-3, -1] and [1, 3] with noise of 0.2, "
        "eight hidden tanh units, a prior precision of 1; predicted are inputs in [-5, 5]. The text holds linearisation "
        "against Monte Carlo; ours holds both against HMC on the same posterior."
    ),
    experiment=Experiment("refinement_toys", "regression-uncertainty"),
    settings={"examples": 40, "noise": 0.2, "hidden": 8, "prior": 1.0, "draws": 10000},
    quick={"chains": 12, "hmc_draws": 200, "repeats": 4},
    paper={"chains": 16, "hmc_draws": 1000, "repeats": 20},
    seconds={"quick": 50, "paper": 150},
)
def figure_4(results: Results) -> Iterator[Row]:
    yield Claim(
        "they differ",
        "Monte Carlo and linearisation yield different uncertainty: their standard deviations differ by more than a tenth, on average.",
        results["difference"] > 0.1,
        "section 3.3",
    )
    yield Claim(
        "Monte Carlo is to be preferred",
        "With so many draws Monte Carlo is to be preferred: its standard deviations are closer to HMC's than those of linearisation.",
        results["gap"] < 0,
        "section 3.3, as far as HMC can tell",
    )
    yield Claim(
        "Monte Carlo predicts better",
        "It predicts new examples better.",
        results["gap_nll"] < 0,
        "section 3.3, as far as new examples can tell",
    )
    yield Claim(
        "HMC has converged",
        "HMC's chains agree about the function: R-hat is below 1.1 at every place and in every data set.",
        results["r_hat"] < 1.1,
    )


@refinement.recipe(
    "figure-5",
    title="Figure 5: confidence by Monte Carlo and by the multi-class probit approximation",
    where="figure 5 and section 3.3",
    note=(
        "Data, widths and prior are not given. Ours: 30 examples of each of three classes around the corners of a "
        "triangle, two hidden layers of eight tanh units, a prior precision of 1. The probit approximation takes the "
        "network linearised; whether what it says is wrong is told by HMC on the same posterior."
    ),
    experiment=Experiment("refinement_toys", "confidence-map"),
    settings={"examples": 90, "spread": 0.6, "hidden": 8, "prior": 1.0},
    quick={"draws": 2000, "chains": 8, "hmc_draws": 150, "repeats": 3},
    paper={"draws": 10000, "chains": 16, "hmc_draws": 1000, "repeats": 20},
    seconds={"quick": 30, "paper": 200},
)
def figure_5(results: Results) -> Iterator[Row]:
    yield Claim(
        "MPA is underconfident",
        "Near the training data the multi-class probit approximation is less confident than Monte Carlo, by more than a hundredth.",
        results["gap_mc_mpa"] > 0.01,
        "section 3.3",
    )
    yield Claim(
        "MPA is underconfident beside HMC",
        "It is less confident there than HMC is, by more than a hundredth.",
        results["gap_hmc_mpa"] > 0.01,
        "section 3.3, as far as HMC can tell",
    )
    yield Claim(
        "MPA errs by itself",
        "It is less confident there than Monte Carlo on the same linearised logits, by more than a hundredth: it is not linearisation alone.",
        results["gap_linear_mpa"] > 0.01,
        "section 3.3, with linearisation in both",
    )
    yield Claim(
        "Monte Carlo is to be preferred",
        "Over the map Monte Carlo is closer to HMC than the multi-class probit approximation is.",
        results["gap_error"] < 0,
        "section 3.3, as far as HMC can tell",
    )
    yield Claim(
        "HMC has converged",
        "HMC's chains agree about the examples' probabilities: R-hat is below 1.1 in every data set.",
        results["r_hat"] < 1.1,
    )


@refinement.recipe(
    "figure-6",
    title="Figure 6: approximations of the posterior of two weights",
    where="figure 6 and section 6.2",
    note=(
        "The published classes, prior, kind of variational Bayes and length of flow are not given, nor are its distances "
        "in the text. Ours: 25 examples of each class around (2, 2) and (-2, -2) with unit variances, a prior precision "
        "of 0.1, two kinds of variational Bayes (the best Gaussian, and the best with independent weights), and a target "
        "that Laplace shares, unlike in the published tables. Numbers are means over data sets; differences are taken "
        "within each."
    ),
    experiment=Experiment("refinement_toys", "logistic-posterior"),
    settings={"examples": 50, "center": [2.0, 2.0], "prior": 0.1, "draws": 600},
    quick={"lengths": [1, 5, 10], "epochs": 1000, "num_draws": 16, "learning_rate": 0.02, "repeats": 10},
    paper={"lengths": [1, 5, 10, 30], "epochs": 3000, "num_draws": 32, "learning_rate": 0.01, "repeats": 20},
    seconds={"quick": 90, "paper": 300},
)
def figure_6(results: Results) -> Iterator[Row]:
    yield Claim(
        "the posterior is skewed",
        "The true posterior density is non-symmetric: its skewness along its longest axis is above 0.3.",
        results["skew_exact"] > 0.3,
        "section 6.2",
    )
    yield Claim(
        "Laplace matches the mean",
        "The Laplace approximation matches the mean of the posterior, to a fifth of a standard deviation.",
        results["mean_la"] < 0.2,
        "section 6.2",
    )
    yield Claim(
        "VB is better than Laplace",
        "Variational Bayes is closer to HMC than the Laplace approximation.",
        results["gap_la_vb"] > 0,
        "section 6.2",
    )
    yield Claim(
        "refined is better than Laplace",
        "Refined by five radial layers, the Laplace approximation is closer to HMC than it was.",
        results["gap_la_r5"] > 0,
        "section 6.2",
    )
    yield Claim(
        "refined is better than a Gaussian without correlation",
        "It is closer to HMC than variational Bayes with independent weights.",
        results["gap_factorised_r5"] > 0,
        "section 6.2, the kind of variational Bayes being unknown",
    )
    yield Claim(
        "refined is better than VB",
        "It is closer to HMC than the best of all Gaussians as well.",
        results["gap_vb_r5"] > 0,
        "section 6.2, the kind of variational Bayes being unknown",
    )
    yield Claim(
        "refined is better than VB, in nats",
        "Its divergence from the exact posterior is below that of the best Gaussian.",
        results["kl_gap_vb_r5"] > 0,
        "section 6.2, in what the flows are trained for",
    )
    yield Claim(
        "refined is skewed",
        "Refined by five layers it is skewed as HMC is: it has half of the skewness or more.",
        results["skew_short_r5"] < 0,
        "section 6.2",
    )
    yield Claim(
        "HMC is the posterior",
        "HMC's draws are the exact posterior's: their mean is, to 0.2 standard deviations, and two runs are 0.005 apart at most.",
        all_of(results["mean_hmc"] < 0.2, results["mmd_again"] < 0.005),
    )


# Last layers: distance to HMC.


@refinement.recipe(
    "figure-7",
    title="Figure 7: refined against naive flows by length",
    where="figure 7 and section 6.3",
    note=(
        "The figure's numbers are not in the text, but for the time. The distribution that naive flows start from is the "
        "target's prior, which is nearer to the posterior than the published N(0, I). Times are those of training steps, "
        "of the processor, of a last layer with the published sizes, and say nothing of a GPU's; 20 draws, as published."
    ),
    studies=(fmnist_last_layer,),
    experiment=Experiment("refinement_toys", "flow-time"),
    quick={"lengths": [1, 5, 10, 30], "steps": 150, "repeats": 8},
    paper={"lengths": [1, 5, 10, 15, 20, 25, 30], "steps": 500, "repeats": 10},
    seconds={"quick": 12, "paper": 60},
)
def figure_7(results: Results) -> Iterator[Row]:
    rows = {f"r{length}": f"few-length{length}-posteriorrefined" for length in LENGTHS}
    rows |= {f"n{length}": f"few-length{length}-posteriornaive" for length in LENGTHS} | {"mode": "few-posteriormode"}
    nll = results.compare("nll", fmnist_last_layer, "nll", rows)
    ece = results.compare("ece", fmnist_last_layer, "ece", rows)
    mmd = results.evaluate("mmd", fmnist_last_layer, MMD, rows)
    yield from column(
        "time of training",
        [("ten layers over five, % more", 53, results["increase_5_10"])],
        tolerance=25,
        because="another machine, on which other parts of a step than the flow take another share",
    )
    yield Claim(
        "refined is better with few layers",
        "With five layers a flow from the Laplace approximation predicts better than one from a data-independent distribution.",
        nll["r5"] < nll["n5"],
        "section 6.3",
    )
    yield Claim(
        "naive needs ten layers",
        "A naive flow needs ten layers to predict as a refined one does with five: with five it is more than 0.005 nats worse, with ten not.",
        all_of(nll["n5"] - nll["r5"] > 0.005, nll["n10"] - nll["r5"] < 0.005),
        "section 6.3",
    )
    yield Claim(
        "refined is closer to HMC",
        "With five layers the refined flow is closer to HMC than the naive one.",
        mmd["r5"] < mmd["n5"],
        "section 6.3, in what the flows approximate",
    )
    yield Claim(
        "one layer",
        "With one layer the refined flow is closer to HMC than the naive one.",
        mmd["r1"] < mmd["n1"],
        "figure 7, the shortest flow",
    )
    yield Claim(
        "long flows cost",
        "Time grows with length: thirty layers take more than twice the time of five.",
        results["seconds_30"] > 2 * results["seconds_5"],
        "section 6.3",
    )
    for numbers, name, title, label in (
        (nll, "nll", "NLL by 20 draws", "NLL, nats"),
        (ece, "calibration", "Calibration error, 15 bins of equal width, by 20 draws", "ECE"),
        (mmd, "distance", "Distance to HMC", "squared MMD to HMC"),
    ):
        lines = {
            "refined": [numbers[key] for key in REFINED],
            "naive": [numbers[f"n{length}"] for length in LENGTHS],
            "Gaussian at the mode": constant(numbers["mode"]),
        }
        yield against_length(name, title, label, lines)


@refinement.recipe(
    "figure-9",
    title="Figure 9: marginals of the weights of Fashion-MNIST by each approximation over HMC's",
    where="figure 9, appendix B.2",
    note=(
        "Which weights are shown is not given. Ours is the 1-Wasserstein distance between the marginals of each "
        "approximation and HMC's, in standard deviations of HMC, the mean over all weights: nothing is chosen. The "
        "densities are of four weights by rule: the one that an approximation places furthest from HMC, and those at 90, "
        "50 and 10 % of that order. That of a second run of HMC is what two samples of one posterior have."
    ),
    studies=(fmnist_last_layer,),
)
def figure_9(results: Results) -> Iterator[Row]:
    return _marginals(results, fmnist_last_layer, "figure 9")


@refinement.recipe(
    "figure-10",
    title="Figure 10: marginals of the weights of CIFAR-10 by each approximation over HMC's",
    where="figure 10, appendix B.2",
    note=(
        "Quick has a ResNet-20 in the place of the WideResNet-16-4. Which weights are shown is not given. Ours is the "
        "1-Wasserstein distance between the marginals of each approximation and HMC's, in standard deviations of HMC, "
        "the mean over all weights: nothing is chosen. The densities are of four weights by rule: the one that an "
        "approximation places furthest from HMC, and those at 90, 50 and 10 % of that order. That of a second run of HMC "
        "is what two samples of one posterior have."
    ),
    studies=(cifar10_last_layer,),
)
def figure_10(results: Results) -> Iterator[Row]:
    return _marginals(results, cifar10_last_layer, "figure 10")


@refinement.recipe(
    "figure-11",
    title="Figure 11: marginals of the weights of CIFAR-100 by each approximation over HMC's",
    where="figure 11, appendix B.2",
    note=(
        "Which weights are shown is not given. Ours is the 1-Wasserstein distance between the marginals of each "
        "approximation and HMC's, in standard deviations of HMC, the mean over all weights: nothing is chosen. The "
        "densities are of four weights by rule: the one that an approximation places furthest from HMC, and those at 90, "
        "50 and 10 % of that order. That of a second run of HMC is what two samples of one posterior have."
    ),
    studies=(cifar100_last_layer,),
)
def figure_11(results: Results) -> Iterator[Row]:
    return _marginals(results, cifar100_last_layer, "figure 11")


def _marginals(results: Results, study: Study, figure: str) -> Iterator[Row]:
    """Compare the marginals of each approximation with HMC's."""
    keys = predictions("la mode r1 r5 r10 r30 again")
    distance, _ = (
        results.evaluate(name, study, {"name": "wasserstein", "over": over}, keys, error=None)
        for name, over in (("distance", "mean"), ("worst", "largest"))
    )
    yield Claim(
        "refined marginals are closer",
        "Refined with five layers, the marginals of the Laplace approximation are closer to those of HMC.",
        distance["r5"] < distance["la"],
        "appendix B.2",
    )
    yield Claim(
        "longer is closer",
        "With thirty layers they are closer than with five.",
        distance["r30"] < distance["r5"],
        figure,
    )
    yield Claim(
        "refined marginals are those of HMC",
        "With thirty layers they are those of HMC, to a fifth of a standard deviation.",
        distance["r30"] < 0.2,
        "appendix B.2",
    )
    yield Claim(
        "so are those of the mode",
        "Those of the Gaussian at the mode, which is not refined, are closer still.",
        distance["mode"] < distance["r30"],
    )
    yield Claim(
        "the mode is as close as HMC itself",
        "They are as close as those of a second run of HMC, to a hundredth of a standard deviation.",
        distance["mode"] - distance["again"] < 0.01,
    )
    lines = {
        "refined": [distance[key] for key in REFINED],
        "Laplace as published": constant(distance["la"]),
        "Gaussian at the mode": constant(distance["mode"]),
        "HMC again": constant(distance["again"]),
    }
    title, label = "Distance of marginals from HMC's, mean over weights", "Wasserstein distance, sd of HMC"
    yield against_length("marginals", title, label, lines, log="y")
    posteriors = {
        "HMC": "hmc",
        "Laplace as published": "la",
        "refined, 1 layer": "refined-length1",
        "refined, 5 layers": "refined-length5",
        "refined, 30 layers": "refined-length30",
        "Gaussian at the mode": "mode",
    }
    yield MarginalFigure("densities", study, posteriors)


@refinement.recipe(
    "text-classification",
    title="Text classification: refined last layers on movie reviews",
    where="section 6.1, which names it; its numbers are in an appendix that is not at hand",
    note=(
        "Movie reviews through the sentence encoder all-MiniLM-L6-v2. No published number stands beside these: what is "
        "judged are the sentences of section 6.3 on another kind of data."
    ),
    studies=(reviews_last_layer,),
)
def text_classification(results: Results) -> Iterator[Row]:
    nll = results.compare("nll", reviews_last_layer, "nll", predictions("temperature la mode r1 r5 r10 r30 hmc"))
    mmd = results.evaluate("mmd", reviews_last_layer, MMD, predictions("temperature la mode r1 r5 r10 r30"))
    yield Claim(
        "refining improves predictions",
        "Refining the Laplace approximation with five layers lowers its NLL.",
        nll["r5"] < nll["la"],
        "section 6.3",
    )
    yield Claim(
        "refined is closer to HMC",
        "Refined with five layers it is closer to HMC.",
        mmd["r5"] < mmd["la"],
        "section 6.3",
    )
    yield Claim(
        "the mode is as close to HMC",
        "The Gaussian at the mode is at least as close to HMC as the longest refined flow.",
        mmd["mode"] < mmd["r30"],
    )
    yield Claim(
        "a temperature does as much",
        "One temperature of the network does as much for its NLL as HMC, to 0.005 nats.",
        nll["temperature"] - nll["hmc"] < 0.005,
    )
    lines = {
        "refined": [mmd[key] for key in REFINED],
        "Laplace as published": constant(mmd["la"]),
        "Gaussian at the mode": constant(mmd["mode"]),
    }
    yield against_length("distance", "Distance to HMC", "squared MMD to HMC", lines)


# Shifts.


@refinement.recipe(
    "figure-8",
    title="Figure 8: calibration under a shift that grows",
    where="figure 8 and appendix B.1",
    note=(
        "The figure is published without numbers, so that its claim alone is judged. Angles are those of the published "
        "code. The corrupted CIFAR-10 was a random draw from all kinds of a published file, at each severity; ours are "
        "generated, of eight of its kinds at five severities of our own, and their mean over the kinds is shown (quick: "
        "four kinds at three severities, of a public ResNet-20). The Gaussian at the mode is the control: what it does "
        "as well is no merit of refinement. The network without a temperature lies far above the figures."
    ),
    studies=(fmnist_rotations, cifar10_corruptions),
)
def figure_8(results: Results) -> Iterator[Row]:
    keys = predictions("map temperature la mode hmc") | {"r5": "refined-5.mc", "r30": "refined-30.mc"}
    rotated = {
        angle: results.compare(
            f"rot{angle}", fmnist_rotations, "nll", keys, step=f"compare-rot{angle}" if angle else "compare"
        )
        for angle in (0, *ANGLES)
    }
    clean = results.evaluate("sev0", cifar10_corruptions, {"name": "nll"}, keys)
    corrupted = {
        (kind, severity): results.evaluate(
            f"{kind.replace('-', '_')}{severity}",
            cifar10_corruptions,
            {"name": "nll"},
            keys,
            split=f"{kind}-{severity}",
        )
        for kind in CORRUPTIONS
        for severity in SEVERITIES
    }
    # At quick there is each second angle, and four kinds at three severities.
    by_angle = {key: mean(*(rotated[angle][key] for angle in ANGLES if angle % 30 == 0)) for key in keys}
    by_kind = {
        key: mean(*(corrupted[kind, severity][key] for kind in QUICK_CORRUPTIONS for severity in (1, 3, 5)))
        for key in keys
    }

    def closer(shifted: Mapping[str, Formula], other: str) -> Inequality:
        """Whether refinement is closer to HMC than another posterior."""
        return abs(shifted["r5"] - shifted["hmc"]) < abs(shifted[other] - shifted["hmc"])

    yield Claim(
        "rotated: closer to HMC",
        (
            "On rotated Fashion-MNIST the NLL of the refined posterior is closer to that of HMC than the NLL of the "
            "Laplace approximation, on average over the angles."
        ),
        closer(by_angle, "la"),
        "appendix B.1",
    )
    yield Claim(
        "corrupted: closer to HMC",
        "On corrupted CIFAR-10 the NLL of the refined posterior is closer to that of HMC than the NLL of the Laplace approximation, on average.",
        closer(by_kind, "la"),
        "appendix B.1",
    )
    yield Claim(
        "rotated: better than the Gaussian at the mode",
        "On rotated Fashion-MNIST refinement is closer to HMC than the Gaussian at the mode.",
        closer(by_angle, "mode"),
    )
    yield Claim(
        "corrupted: better than the Gaussian at the mode",
        "On corrupted CIFAR-10 refinement is closer to HMC than the Gaussian at the mode.",
        closer(by_kind, "mode"),
    )
    yield Claim(
        "rotated: HMC better than a temperature",
        "On rotated Fashion-MNIST HMC has a lower NLL than the network at its best temperature on val.",
        by_angle["hmc"] < by_angle["temperature"],
    )
    yield Claim(
        "corrupted: HMC better than a temperature",
        "On corrupted CIFAR-10 HMC has a lower NLL than the network at its best temperature on val.",
        by_kind["hmc"] < by_kind["temperature"],
    )
    yield Claim(
        "corrupted: HMC better than Laplace",
        "On corrupted CIFAR-10 HMC has a lower NLL than the Laplace approximation as published.",
        by_kind["hmc"] < by_kind["la"],
    )
    names = {
        "temperature": "the network at its best temperature",
        "la": "Laplace, as published",
        "r5": "refined, 5 layers",
        "r30": "refined, 30 layers",
        "mode": "Gaussian at the mode",
        "hmc": "HMC",
    }

    def mean_over(kinds: Sequence[str], severity: int, key: str) -> Formula:
        return mean(*(corrupted[kind, severity][key] for kind in kinds))

    yield LineFigure(
        "rotated",
        "Rotated Fashion-MNIST",
        (0, *ANGLES),
        "degrees",
        "NLL, nats",
        {called: [rotated[angle][key] for angle in (0, *ANGLES)] for key, called in names.items()},
    )
    yield LineFigure(
        "corrupted",
        "Corrupted CIFAR-10, mean over four kinds",
        (0, 1, 3, 5),
        "severity",
        "NLL, nats",
        {
            called: [clean[key], *(mean_over(QUICK_CORRUPTIONS, severity, key) for severity in (1, 3, 5))]
            for key, called in names.items()
        },
    )
    yield LineFigure(
        "corrupted-all-kinds",
        "Corrupted CIFAR-10, mean over eight kinds",
        tuple(SEVERITIES),
        "severity",
        "NLL, nats",
        {called: [mean_over(CORRUPTIONS, severity, key) for severity in SEVERITIES] for key, called in names.items()},
    )
