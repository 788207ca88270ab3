"""Skaaret-Lund (2022): latent binary networks. Tables 1 to 3, and figures 5.2 to 5.11."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from bnncli.papers import SCALES
from bnncli.papers.numbers import Combination, Formula, all_of
from bnncli.papers.recipe import (
    Claim,
    Experiment,
    LineFigure,
    Ours,
    Place,
    Published,
    PublishedWork,
    Reading,
    Results,
    Row,
    both,
    column,
    needs,
)
from bnncli.papers.studies import lbbnn_fmnist, lbbnn_kmnist, lbbnn_mnist, simulation_study

lbbnn = PublishedWork(
    "lbbnn",
    "Skaaret-Lund (2022), Latent binary Bayesian neural networks with normalizing flows, master's thesis, University of Oslo",
)
STUDIES = {"kmnist": lbbnn_kmnist, "mnist": lbbnn_mnist, "fmnist": lbbnn_fmnist}
FEW_EPOCHS = {"quick": "quick has four epochs on 2,000 images, long before inclusions settle: it cannot tell of 250"}
METHODS = {"concrete": "concrete", "lrt": "lrt", "mnf": "mnf", "low": "mnf-short"}  # posteriors of figures 5.4 to 5.7
HUNDREDTHS = [5, 10, 25, 50, 100, 150, 200]  # of a nat
LABELS = {"concrete": "concrete (baseline)", "lrt": "LRT", "mnf": "flows", "low": "flows, low accuracy"}


# The simulation study.


def _selected(posterior: str, metric: str) -> Place:
    return ("rows", {"posterior": posterior, "split": "test"}, "metrics", {"name": metric})


@lbbnn.recipe(
    "figure-5.2",
    title="Figure 5.2: variables that latent binary networks select",
    where="figure 5.2 and section 5.2",
    note=(
        "The text lists coefficients that did not make these data: with the sign of the 13th turned and an intercept of "
        "99 they did. The rates are shares of the nine variables with a coefficient and of the eleven without one; as "
        "the text writes them they are sums of 0/0. Under the published prior the exact posterior, enumerated, selects 7 "
        "of 9 and 0 of 11: higher rates are no better selection. The published baseline was fitted by SGD with an "
        "incorrect prior; ours is the same model by Adam."
    ),
    studies=(simulation_study,),
)
def figure_5_2(results: Results) -> Iterator[Row]:
    posteriors = {"mnf_published": "mnf-published", "mnf": "mnf", "concrete": "concrete"}
    tpr, fpr = (
        {
            key: results.read(
                f"{name}_{key}", Reading(simulation_study, "evaluate", _selected(posterior, metric), count="repeats")
            )
            for key, posterior in posteriors.items()
        }
        for name, metric in (("tpr", "true_positive_rate"), ("fpr", "false_positive_rate"))
    )
    because = "rates of the published learning-rate schedule, whose Adam begins anew at each of its steps"
    for name, rate, flows, baseline in (
        ("true positive rate", tpr, 0.80, 0.68),
        ("false positive rate", fpr, 0.13, 0.28),
    ):
        cells: list[tuple[str, Published, Ours]] = [
            ("LBBNN-GP-MF-MNF", flows, both(rate["mnf_published"], rate["mnf"])),
            ("LBBNN-GP-MF", baseline, rate["concrete"]),
        ]
        yield from column(name, cells, tolerance=0.05, because=because)
    yield Claim(
        "flows find more",
        "The method with normalizing flows has the higher true positive rate.",
        tpr["mnf_published"] > tpr["concrete"],
        "section 5.2",
    )
    yield Claim(
        "flows are wrong less",
        "The method with normalizing flows has the lower false positive rate.",
        fpr["mnf_published"] < fpr["concrete"],
        "section 5.2",
    )


@lbbnn.recipe(
    "figure-5.3",
    title="Figure 5.3: how often each variable is selected",
    where="figure 5.3 and section 5.2",
    note=(
        "The bars have no numbers but those that the text tells: always, or never, with flows. Variables 1, 3, 7, 11, 13 "
        "and 16 to 19 have a coefficient. Never and always are of 100 runs; quick has 10, which cannot tell 94 of 100, "
        "what 100 of 100 can show, from fewer. Standard errors are those of a share of so many runs. Under the published "
        "prior the exact posterior leaves out two of the nine."
    ),
    studies=(simulation_study,),
)
def figure_5_3(results: Results) -> Iterator[Row]:
    variables = range(1, 21)
    mnf_published, mnf, concrete = (
        {
            n: results.read(
                f"{step.replace('-', '_')}_{n}",
                Reading(
                    simulation_study,
                    step,
                    ("metrics", "inputs", {"input": str(n)}),
                    value="share_in",
                    error=None,
                    trials=("evaluate", (*_selected(step, "true_positive_rate"), "repeats")),
                ),
            )
            for n in variables
        }
        for step in ("mnf-published", "mnf", "concrete")
    )
    published = {7: 1.0, 8: 0.0, 16: 1.0, 17: 1.0, 11: 0.0}
    yield from column(
        "share of runs that select it, with flows",
        [(f"variable {n}", share, both(mnf_published[n], mnf[n])) for n, share in published.items()],
        tolerance=0.1,
        because="what always or never happens in 100 runs may happen otherwise in one of 10",
    )
    yield Claim(
        "7 and not 8",
        "With flows variable 7 is always selected and variable 8 never.",
        all_of(mnf_published[7] > 0.94, mnf_published[8] < 0.06),
        "section 5.2",
        not_at={"quick": "quick has 10 runs: that all of them select it does not show that 94 in 100 do"},
    )
    yield Claim(
        "16 and 17",
        "With flows both 16 and 17 are always selected.",
        all_of(mnf_published[16] > 0.94, mnf_published[17] > 0.94),
        "section 5.2",
        not_at={"quick": "quick has 10 runs: that all of them select it does not show that 94 in 100 do"},
    )
    yield Claim(
        "the baseline does worse",
        "The baseline does worse in this respect: of 7, 16 and 17 selected and 8 not.",
        concrete[7] + concrete[16] + concrete[17] - concrete[8]
        < mnf_published[7] + mnf_published[16] + mnf_published[17] - mnf_published[8],
        "section 5.2",
    )
    yield Claim(
        "11 is missed",
        "Variable 11 is never selected with flows, and rarely by the baseline.",
        all_of(mnf_published[11] < 0.06, concrete[11] < 0.25),
        "section 5.2",
        not_at={"quick": "quick has 10 runs: that none of them selects it does not show that fewer than 6 in 100 do"},
    )
    yield LineFigure(
        "selected",
        "How often each variable is selected",
        variables,
        "variable; with a coefficient: 1, 3, 7, 11, 13, 16 to 19",
        "share of runs",
        {
            "flows, published": list(mnf_published.values()),
            "flows, right": list(mnf.values()),
            "concrete (baseline)": list(concrete.values()),
        },
    )


# Images.


@lbbnn.recipe(
    "tables-1-2-3",
    title="Tables 1 to 3: accuracy and density of latent binary networks",
    where="tables 1 to 3, section 5.3; medians of ten runs",
    note=(
        "Ours is one run each, whose standard errors are those of the test images. The baseline is the same model with "
        "an incorrect prior in the released code; ours is it with relaxed inclusions at a temperature of 0.5. Published "
        "are activations with variance alpha^2 sigma^2, right those with the variance that the weights have. The "
        "ensemble is a mean of ten networks' probabilities, where the released code has that of their logarithms, and "
        "density the mean inclusion probability. Two hidden layers, 400 and 600, as in the released code; the text has "
        "three. KMNIST's training set takes a path."
    ),
    studies=(lbbnn_mnist, lbbnn_fmnist, lbbnn_kmnist),
)
def tables_1_2_3(results: Results) -> Iterator[Row]:
    mean: dict[str, dict[str, Formula]] = {}
    ensemble: dict[str, dict[str, Formula]] = {}
    density: dict[str, dict[str, Formula]] = {}
    methods = ("concrete", "lrt", "mnf", "lrt-published", "mnf-published")
    for data, study in STUDIES.items():
        for kind, found, integrator in (("mean", mean, "mean"), ("ens", ensemble, "mc")):
            rows = {method.replace("-", "_"): f"{method}.{integrator}" for method in methods}
            found[data] = results.evaluate(f"{kind}_{data}", study, {"name": "accuracy"}, rows)
        density[data] = {
            method.replace("-", "_"): results.read(
                f"density_{data}_{method.replace('-', '_')}",
                Reading(study, method, ("metrics",), value="density", error=None),
            )
            for method in methods
        }
    for number, (data, means, ensembles, densities) in enumerate(
        (
            ("kmnist", [90.56, 92.38, 92.85], [90.01, 92.28, 92.59], [0.118, 0.049, 0.064]),
            ("mnist", [98.11, 98.46, 98.49], [98.01, 98.49, 98.5], [0.092, 0.049, 0.057]),
            ("fmnist", [88.21, 89.57, 90.04], [88.46, 89.56, 90.06], [0.118, 0.049, 0.064]),
        ),
        start=1,
    ):
        table = f"Table {number}, {data.upper()}"
        for name, ours, published, tolerance in (
            ("accuracy of the posterior mean, %", _percent(mean[data]), means, 0.4),
            ("accuracy of the ensemble, %", _percent(ensemble[data]), ensembles, 0.4),
            ("density", density[data], densities, 0.02),
        ):
            lrt, mnf = (both(ours[f"{method}_published"], ours[method]) for method in ("lrt", "mnf"))
            methods_shown: dict[str, Ours] = {
                "LBBNN-GP-MF": ours["concrete"],
                "LBBNN-GP-MF-LRT": lrt,
                "LBBNN-GP-MF-MNF": mnf,
            }
            yield from column(
                f"{table}: {name}",
                [(row, value, our) for (row, our), value in zip(methods_shown.items(), published, strict=True)],
                tolerance=tolerance,
                because="one run beside the median of ten, whose range is up to 1.1 % and whose densities are means",
                not_at={"quick": "quick has 2,000 of the 60,000 images and 4 of 250 epochs"},
            )
    for data in ("mnist", "fmnist", "kmnist"):

        def better(method: str, other: str, data: str = data) -> Combination:
            """Whether a method has the higher accuracies, of the posterior mean and of the ensemble."""
            return all_of(*(accuracy[data][method] > accuracy[data][other] for accuracy in (mean, ensemble)))

        yield Claim(
            f"LRT beats the baseline on {data}",
            "Local reparametrization has significantly better accuracy than the baseline, of the posterior mean and of the "
            f"ensemble, on {data.upper()}.",
            better("lrt_published", "concrete"),
            "section 5.3",
            not_at=FEW_EPOCHS,
        )
        yield Claim(
            f"flows improve on {data}",
            f"Flows improve both accuracies further on {data.upper()}.",
            better("mnf_published", "lrt_published"),
            "section 5.3",
            not_at=FEW_EPOCHS,
        )


def _percent(numbers: Mapping[str, Formula]) -> dict[str, Formula]:
    return {key: 100 * one for key, one in numbers.items()}


@lbbnn.recipe(
    "figures-5.4-5.7",
    title="Figures 5.4 to 5.7: entropies in and out of distribution",
    where="figures 5.4 to 5.7 and section 5.4",
    note=(
        "The figures are distributions and have no numbers; ours are mean entropies of ten draws' mean probabilities, in "
        "nats, their distribution functions (figures 5.4 and 5.5) and histograms (5.6 and 5.7); `low` is the run of low "
        "accuracy. The published ones are those of expit(log p), renormalised, which is p / (1 + p): probabilities of "
        "0.545 become 0.840. How the run of low accuracy was made is not given; ours is the method with flows after few "
        "epochs."
    ),
    studies=(lbbnn_mnist, lbbnn_fmnist),
    experiment=Experiment("lbbnn_toys", "entropy-curves"),
    settings={"methods": METHODS, "hundredths": HUNDREDTHS},
    seconds={"quick": 2, "paper": 5},
    reads={"mnist": "lbbnn-mnist/predictions.npz", "fmnist": "lbbnn-fmnist/predictions.npz"},
)
def figures_5_4_5_7(results: Results) -> Iterator[Row]:
    sets = {"mnist": ("MNIST", "F-MNIST"), "fmnist": ("F-MNIST", "MNIST")}  # trained on, and the other one
    inside: dict[str, dict[str, Formula]] = {}
    outside: dict[str, dict[str, Formula]] = {}
    accuracy: dict[str, dict[str, Formula]] = {}
    rows = {method: f"{posterior}.mc" for method, posterior in METHODS.items()}
    for data in sets:
        for found, name, metric, split in (
            (inside, "test", "mean_entropy", "test"),
            (outside, "other", "mean_entropy", "other"),
            (accuracy, "accuracy", "accuracy", "test"),
        ):
            found[data] = results.evaluate(f"{data}_{name}", STUDIES[data], {"name": metric}, rows, split=split)
    for data, (own, other) in sets.items():
        in_own, in_other = inside[data], outside[data]
        yield Claim(
            f"worse is less certain, {data}",
            f"The run of lower accuracy on {own} has the higher entropy on {other}.",
            all_of(accuracy[data]["low"] < accuracy[data]["mnf"], in_other["low"] > in_other["mnf"]),
            "section 5.4",
            not_at=FEW_EPOCHS,
        )
        yield Claim(
            f"worse is less certain in distribution, {data}",
            f"And the higher entropy on {own} itself.",
            in_own["low"] > in_own["mnf"],
            "section 5.4",
            not_at=FEW_EPOCHS,
        )
        yield Claim(
            f"the baseline is less certain, {data}",
            "The baseline, of the worst accuracy, has higher entropy out of distribution than the two others, trained on "
            f"{own}.",
            all_of(in_other["concrete"] > in_other["lrt"], in_other["concrete"] > in_other["mnf"]),
            "section 5.4",
            not_at=FEW_EPOCHS,
        )
        yield Claim(
            f"less certain out than in, {data}",
            f"Each of the three methods trained on {own} has higher entropy on {other} than on {own}.",
            all_of(*(in_other[method] > in_own[method] for method in ("concrete", "lrt", "mnf"))),
            not_at=FEW_EPOCHS,
        )

    def below(data: str, split: str, method: str, hundredths: int = 5) -> Formula:
        """Return the share of images whose entropy is at most so many hundredths of a nat."""
        return results[f"below_{data}_{split}_{method}_{hundredths}"]

    for data, (own, _) in sets.items():
        flows = below(data, "other", "mnf")
        yield Claim(
            f"worse is overconfident less, {data}",
            f"Trained on {own}, the methods with the worst accuracy, the baseline and the run of low accuracy, have fewer "
            "overconfident predictions out of distribution: entropies below 0.05.",
            all_of(below(data, "other", "concrete") < flows, below(data, "other", "low") < flows),
            "section 5.4",
            not_at=FEW_EPOCHS,
        )
    yield Claim(
        "overconfident at all",
        "A large proportion of predictions out of distribution is overconfident: with flows more than a tenth of the "
        "entropies is below 0.05, on both sets.",
        all_of(*(below(data, "other", "mnf") > 0.1 for data in sets)),
        "section 5.4",
        not_at=FEW_EPOCHS,
    )
    for data, (own, _) in sets.items():
        yield LineFigure(
            data,
            f"Networks trained on {own}",
            (1, 2),
            "1: in distribution, 2: out of it",
            "mean entropy, nats",
            {label: [inside[data][method], outside[data][method]] for method, label in LABELS.items()},
        )
    for data, (own, _) in sets.items():
        for split, side in (("other", "out of"), ("test", "in")):
            yield LineFigure(
                f"shares-{data}-{split}",
                f"Networks trained on {own}: entropies {side} distribution",
                [one / 100 for one in HUNDREDTHS],
                "entropy, nats",
                "share of images at or below it",
                {label: [below(data, split, method, one) for one in HUNDREDTHS] for method, label in LABELS.items()},
            )


@lbbnn.recipe(
    "figure-5.8",
    title="Figure 5.8: negative log likelihood of the training data",
    where="figure 5.8 and section 5.3",
    note=(
        "The figure is curves of a median over runs and has no numbers; ours are the expected negative log likelihoods "
        "of the training split at the end, summed over the images, in nats."
    ),
    studies=(lbbnn_mnist, lbbnn_fmnist, lbbnn_kmnist),
)
def figure_5_8(results: Results) -> Iterator[Row]:
    likelihood = {
        (data, method): results.read(f"{data}_{method}", Reading(study, method, ("metrics", "expected_log_likelihood")))
        for data, study in STUDIES.items()
        for method in ("concrete", "lrt", "mnf")
    }
    for data in ("mnist", "fmnist", "kmnist"):
        baseline = likelihood[data, "concrete"]
        yield Claim(
            f"the baseline is worse on {data}",
            f"The baseline is worse at minimising the negative log likelihood of the training data of {data.upper()}.",
            all_of(baseline < likelihood[data, "lrt"], baseline < likelihood[data, "mnf"]),
            "section 5.3",
            not_at=FEW_EPOCHS,
        )
    yield LineFigure(
        "training",
        "Training data",
        (1, 2),
        "1: MNIST, 2: F-MNIST",
        "negative log likelihood, nats",
        {
            LABELS[method]: [-likelihood["mnist", method], -likelihood["fmnist", method]]
            for method in ("concrete", "lrt", "mnf")
        },
    )


@lbbnn.recipe(
    "figures-5.9-5.11",
    title="Figures 5.9 to 5.11: images that latent binary networks are most and least certain of",
    where="figures 5.9 to 5.11 and section 5.4",
    note=(
        "The figures are images and have no numbers. Ours are drawn as these are, of the method with flows: ten of each "
        "class of the first 1,000 test images, the five of the lowest entropy left of the line and the five of the "
        "highest right of it. What the text says of their looks is measured: thicker lines as a higher mean intensity, "
        "of 1, and images that look alike as a smaller root mean square distance to each other; differences are means "
        "over the classes."
    ),
    studies=(lbbnn_kmnist, lbbnn_mnist, lbbnn_fmnist),
    experiment=Experiment("lbbnn_toys", "certain-images"),
    settings={"images": 1000, "posterior": "mnf"},
    needs=dict.fromkeys(SCALES, needs({f"{data}_images": f"data/{data}-test.npz" for data in STUDIES})),
    seconds={"quick": 2, "paper": 3},
    reads={data: f"lbbnn-{data}/predictions.npz" for data in STUDIES},
)
def figures_5_9_5_11(results: Results) -> Iterator[Row]:
    yield Claim(
        "certain lines are thicker, kmnist",
        "On KMNIST one could perhaps argue that images of low entropy have thicker lines.",
        results["thicker_kmnist"] > 0,
        "section 5.4",
        not_at=FEW_EPOCHS,
    )
    yield Claim(
        "certain lines are thicker, mnist",
        "On MNIST images of low entropy seem to have thicker lines as well.",
        results["thicker_mnist"] > 0,
        "section 5.4",
        not_at=FEW_EPOCHS,
    )
    yield Claim(
        "certain images are alike, fmnist",
        "On F-MNIST images of low entropy look very similar within each class, and those of high entropy very diverse.",
        results["alike_fmnist"] > 0,
        "section 5.4",
        not_at=FEW_EPOCHS,
    )
    yield Claim(
        "certain images are alike, mnist",
        "The same on MNIST, of which the text does not say it.",
        results["alike_mnist"] > 0,
        not_at=FEW_EPOCHS,
    )
