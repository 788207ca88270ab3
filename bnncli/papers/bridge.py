"""Hobbhahn (2020): the Laplace bridge. Figures 1.1 to 5.6, and tables 5.1, 7.1, 7.2 and 7.3."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bnncli.papers import SCALES
from bnncli.papers.numbers import require_all
from bnncli.papers.recipe import Cell, Claim, Experiment, PublishedWork, Results, Row, column, needs
from bnncli.papers.studies import fmnist_top_k

bridge = PublishedWork(
    "bridge",
    "Hobbhahn (2020), Fast predictive uncertainty for classification with Bayesian deep networks, arXiv 2003.01227",
)
MNIST = {"train": "data/mnist-train.npz", "test": "data/mnist-test.npz"}
OTHERS = {name: f"data/{name}-test.npz" for name in ("fmnist", "notmnist", "kmnist")}
SEEN = {"test": "MNIST", "fmnist": "F-MNIST", "notmnist": "notMNIST", "kmnist": "KMNIST"}  # by a network on MNIST
RETRAINED = "retrained networks"
NO_RESNETS = "needs ResNet-18s trained on CIFAR-10, SVHN and CIFAR-100 as published, which recipes have not"
# fmt: off


# Densities on the simplex, and toy networks.


@bridge.recipe(
    "figures-1.1-2.1-2.3", title="Figures 1.1 and 2.1 to 2.3: densities on the simplex", where="chapters 1 and 2",
    note="Only the two Dirichlets of figure 1.1 are given; the Betas are ours, the Gaussians those of section 5.3. Distances "
         "are total variations between shares of samples at 561 points, with a noise of about 0.01. Captured is below 0.1 in "
         "figure 1.1, whose Gaussians are a Dirichlet's own, and below 0.25 elsewhere. The published bridge takes the logits' "
         "variances as they are, the projected one those of the logits minus their mean.",
    experiment=Experiment("bridge_toys", "simplex-densities"), quick={"samples": 200000}, paper={"samples": 2000000},
    seconds=(8, 20),
)
def figures_1_1_2_1_2_3(results: Results) -> Iterator[Row]:
    yield from column("parameters of figure 1.1", [("largest difference of the means", 0.0, "mean_shift"),
                                                   ("largest difference of the modes", 0.0, "mode_shift")],
                      tolerance=0.005, because="the numbers are given whole")
    yield Claim("same mode", "The two Dirichlets of figure 1.1 have the same mode.", "mode_shift < 0.005",
                "caption of figure 1.1")
    yield Claim("same point estimate", "alpha = [2, 2, 6] and [11, 11, 51] yield the same point estimate, the mean.",
                "mean_shift < 0.005", "chapter 2")
    yield Claim("no approximation in the standard basis",
                "In the standard basis the first Beta has no valid Laplace approximation.", "curvature_1 > 0",
                "caption of figure 2.1")
    yield Claim("the softmax basis is more accurate", "In the softmax basis the approximations of the others are closer.",
                "tv_softmax_2 < tv_standard_2 and tv_softmax_3 < tv_standard_3", "caption of figure 2.1")
    yield Claim("they integrate to one",
                "Transformed back they integrate to 1 on the simplex, which those of the standard basis do not.",
                f"{require_all('abs(integral_{} - 1) < 0.001', 1, 2, 3)} and {require_all('outside_{} > 0.001', 2, 3)}",
                "caption of figure 2.1")
    yield Claim("figure 1.1 is captured", "The bridge captures the densities of figure 1.1: distances below 0.1.",
                "tv_1 < 0.1 and tv_2 < 0.1", "chapter 2")
    yield Claim("other Gaussians are captured",
                "It captures most features of the three Gaussians of section 5.3: distances below 0.25.",
                require_all("tv_{} < 0.25", 3, 4, 5), "caption of figure 2.2")
    yield Claim("the projected bridge captures them", "So are those of the logits minus their mean.",
                require_all("tv_projected_{} < 0.25", 3, 4, 5))
    yield Claim("uncertainty goes the right way",
                "With four times the covariance its variance rises, as that of the samples does.",
                require_all("spread_{0}_25 < spread_{0}_100 and spread_{0}_100 < spread_{0}_400", "bridge", "truth"), "chapter 2")


@bridge.recipe(
    "figure-5.3", title="Figure 5.3: samples that a density on the simplex takes to be as good as the Laplace bridge's",
    where="figure 5.3 and section 5.3; the divergences from its released notebook",
    note="The published bridge takes the Gaussian's variances as they are; right are those of the logits minus their "
         "mean, as only their differences matter to a softmax. That helps the first two Gaussians and hurts the third, "
         "for which the bridge is poor either way.",
    experiment=Experiment("bridge_toys", "simplex-kl"), settings={"truth": 100000},
    quick={"sizes": [100, 250, 500, 750, 1000, 2500, 5000, 7500, 10000, 25000, 50000], "repeats": 3},
    paper={"sizes": [1, 2, 5, *(n * k for k in (1, 10, 100, 1000) for n in (10, 25, 50, 75)), 100000], "repeats": 5},
    seconds=(4, 20),
)
def figure_5_3(results: Results) -> Iterator[Row]:
    cells = [(f"Gaussian {n}", kl, (f"kl_{n}", f"kl_projected_{n}")) for n, kl in enumerate((0.088, 0.708, 1.766), start=1)]
    yield from column("KL divergence of the bridge", cells, tolerance=0.02, because="ties of nearest points may have gone otherwise")
    yield Claim("many samples", "For every one of the three Gaussians it takes between 500 and 10,000 samples.",
                require_all("samples_{0} > 500 and samples_{0} < 10000", 1, 2, 3), "section 5.3")
    yield Claim("caption", "Sampling becomes as good after 750 samples or more for every one of the three.",
                require_all("samples_{} > 750", 1, 2, 3), "caption of figure 5.3")


@bridge.recipe(
    "figure-5.4", title="Figure 5.4: uncertainty of a network on four Gaussians, near them and far away",
    where="figure 5.4 and section 5.4",
    note="Neither data nor prior nor code are given. Ours: four Gaussians of standard deviation 0.7 at (+-2, +-2), prior "
         "precision 1, and the predicted class's probability times 1 - 4 Var as the weighted map. Better ranks points farther "
         "than 6 standard deviations from every centre above new points (AUROC). The whole Gauss-Newton matrix stands for the "
         "exact Hessian, which is indefinite; the bridge takes the diagonal's variances.",
    experiment=Experiment("bridge_toys", "toy-gaussians"), settings={"precision": 1.0},
    quick={"per_class": 20, "steps": 400, "draws": 400, "repeats": 6},
    paper={"per_class": 100, "steps": 2000, "draws": 2000, "repeats": 10}, seconds=(24, 120),
)
def figure_5_4(results: Results) -> Iterator[Row]:
    yield Claim("a diagonal helps", "The diagonal's entropy is better than the network's.", "gain_diag_over_map > 0",
                "section 5.4")
    yield Claim("Kronecker factors help more", "The Kronecker-factored one's is better than the diagonal's.",
                "gain_kron_over_diag > 0", "section 5.4")
    yield Claim("the whole matrix is best", "The exact one's is better than the Kronecker-factored one's.",
                "gain_exact_over_kron > 0", "section 5.4")
    yield Claim("the bridge's entropy is marginally better",
                "The entropy of the bridge is marginally better than the network's: its AUROC is higher, by less than 0.1.",
                "gain_bridge_entropy_over_map > 0 and gain_bridge_entropy_over_map < 0.1", "section 5.4 and caption")
    yield Claim("the bridge's variance is marginally better",
                "The variance of the bridge is marginally better than the network's entropy: by less than 0.1 of AUROC.",
                "gain_bridge_variance_over_map > 0 and gain_bridge_variance_over_map < 0.1", "section 5.4 and caption")
    yield Claim("weights improve it", "Weighting the bridge's prediction by its variance improves it.",
                "gain_bridge_weighted_over_bridge_entropy > 0", "section 5.4 and caption")
    yield Claim("the bridge is no Kronecker-factored or exact one",
                "The weighted bridge is not as good as a Kronecker-factored or an exact Hessian.",
                "gain_kron_over_bridge_weighted > 0 and gain_exact_over_bridge_weighted > 0", "section 5.4")
    yield Claim("another covariance does not cure it",
                "Of the whole matrix's variances the weighted bridge is no better than the network's entropy either.",
                "gain_exact_bridge_weighted_over_map < 0")


@bridge.recipe(
    "figures-5.5-5.6", title="Figures 5.5 and 5.6: classes that cannot be told apart, by the overlap of their Beta marginals",
    where="figures 5.5 and 5.6, algorithm 1 and section 5.5",
    note="LeNet-5 on Fashion-MNIST instead of DenseNet on ImageNet. T is 0.05, as in algorithm 1; at most ten classes are "
         "kept. The released code compares each class with the first (`best`). The released notebook adds 1 / 0.5, or 1 / "
         "0.004 for the Beta densities, to the mean curvature with no factor N: claims of the text are judged with these, ours "
         "also with the right covariance. The plain rule keeps the fewest classes whose probabilities sum to a threshold, with "
         "as many classes on average.",
    studies=(fmnist_top_k,), experiment=Experiment("bridge_toys", "overlapping-classes"), settings={"variances": [0.5, 0.004]},
    quick={"images": 2000}, paper={"images": 10000},
    needs={"quick": needs(net="fixtures/lenet5-fmnist.pt", train="fixtures/train.npz", test="fixtures/test.npz"),
           "paper": needs(net="checkpoints/lenet-fmnist-1.pt", train="data/fmnist-train.npz", test="data/fmnist-test.npz")},
    seconds=(8, 30),
)
def figures_5_5_5_6(results: Results) -> Iterator[Row]:
    network = {"name": "map.plug-in", "split": "test"}
    results.read("top1", fmnist_top_k, "evaluate", ("rows", network, "metrics", {"name": "accuracy"}))
    rows = {name: name for name in ("neighbor", "best", "published", "normalized")}
    for name in ("length", "accuracy", "gain"):
        results.evaluate(name, fmnist_top_k, f"ranked_{name}", rows)
    published = {"top-1 accuracy": 0.744, "uncertainty-aware top-k accuracy": 0.797, "mean k": 1.688}
    yield from column("ImageNet", [(row, value, None) for row, value in published.items()], tolerance=0.01,
                      because="three decimals of a network that is public",
                      why="needs ImageNet's 50,000 validation images and a DenseNet, which recipes have not")
    yield Claim("higher accuracy", "The accuracy of the uncertainty-aware ranking is above the top-1 accuracy.",
                "rescued_500_neighbor > 0", "section 5.5")
    yield Claim("mostly top-1",
                "Most predictions are of one class: fewer than half of them are longer, as their mean length is below 1.5.",
                "length_500_neighbor < 1.5", "caption of figure 5.6")
    yield Claim("longer than one", "Some predictions are of several classes: more than one in a hundred.",
                "longer_500_neighbor > 0.01", "caption of figure 5.6")
    yield Claim("the same of logits minus their mean",
                "Both hold with the variances of the logits minus their mean as well: accuracy and length.",
                "accuracy_neighbor > top1 and length_neighbor < 1.5")
    yield Claim("normalised logits make longer answers",
                "Logits that are shrunk where their variance is large make longer answers: the mean length is above 1.01.",
                "length_normalized > 1.01")
    yield Claim("comparing with the first is no longer", "The released rule keeps fewer classes than the printed one.",
                "length_500_best < length_500_neighbor")
    yield Claim("better than a plain rule", "It is right more often than the plain rule with as many classes on average.",
                "gain_500_neighbor > 0")
    yield Claim("the prior decides",
                "With the variance of the Beta densities, 0.004, fewer predictions are of several classes than with 0.5.",
                "longer_4_neighbor < longer_500_neighbor")
    yield Claim("rightly hardly any",
                "With the covariance that has the factor N fewer than one in a hundred predictions are of several classes.",
                "longer_500_neighbor_right < 0.01")


# Networks on digits.


@bridge.recipe(
    "figures-5.1-5.2", title="Figures 5.1 and 5.2: the Dirichlet's variance on digits that the network has not seen",
    where="section 5.1, figures 5.1 and 5.2",
    note="The figure has no numbers. Published: the inverse of the mean curvature plus 1/2, with no factor N; right: the "
         "diagonal of (N H + tau)^-1, with tau such that samples are 5 % less confident than the network on training images. "
         "Variances are of the predicted class.",
    experiment=Experiment("bridge_digits", "digit-variance"),
    quick={"train": 2000, "epochs": 3, "curvature": 150, "images": 1000},
    paper={"train": 18623, "epochs": 6, "curvature": 5000, "images": 10000}, needs=dict.fromkeys(SCALES, needs(MNIST)),
    seconds=(20, 900),
)
def figures_5_1_5_2(results: Results) -> Iterator[Row]:
    yield Claim("nearly nil on what was seen",
                "The mean variance of the first three digits is close to zero, by the published definition.",
                "variance_seen_published < 0.01", "section 5.1")
    yield Claim("higher on what was not",
                "The lowest of the other digits is above the highest of these, by the published definition.",
                "highest_seen_published < lowest_unseen_published", "section 5.1")
    yield Claim("nearly nil, rightly", "The mean variance of the first three digits is close to zero with the right covariance.",
                "variance_seen < 0.01", "section 5.1")
    yield Claim("higher, rightly", "The lowest of the other digits is above the highest of these with the right covariance.",
                "highest_seen < lowest_unseen", "section 5.1")
    yield Claim("the variance says more than the network",
                "The variance tells unseen digits apart better than the network's own confidence (AUROC).",
                "auroc > auroc_map and auroc_published > auroc_map")


# What ResNet-18s were trained on and see, in the order of table 7.2; table 5.1 has two rows the other way round.
PAIRS = ["CIFAR-10, CIFAR-10", "CIFAR-10, CIFAR-100", "CIFAR-10, SVHN", "SVHN, SVHN", "SVHN, CIFAR-100", "SVHN, CIFAR-10",
         "CIFAR-100, CIFAR-100", "CIFAR-100, CIFAR-10", "CIFAR-100, SVHN"]
PAIRS_5_1 = [*PAIRS[:4], PAIRS[5], PAIRS[4], *PAIRS[6:]]


def _resnets(name: str, pairs: Sequence[str], published: Sequence[float], errors: Sequence[float | None] = (),
             count: int = 0) -> Iterator[Cell]:
    """Yield a column that cannot be measured here; AUROCs are of what a network was not trained on."""
    if len(published) < len(pairs):
        pairs = [pair for pair in pairs if len({*pair.split(", ")}) > 1]
    rows = zip(pairs, published, errors or [None] * len(pairs), strict=True)
    cells = [(pair, value if error is None else (value, error), None) for pair, value, error in rows]
    yield from column(name, cells, tolerance=0.05, because=RETRAINED, count=count, why=NO_RESNETS)


@bridge.recipe(
    "table-7.1", title="Table 7.1: how often the condition of proposition 1 holds",
    where="table 7.1, proposition 1 and appendix A",
    note="The text does not name the class: here it is the most probable one. The rows of networks on MNIST are empty in "
         "the table and measured here. Of large concentrations the condition only says that this class has more than a third "
         "of the probability.",
    experiment=Experiment("bridge_digits", "proposition-frequency"),
    quick={"train": 3000, "epochs": 3, "curvature": 200, "tuned": 50, "images": 200},
    paper={"train": 60000, "epochs": 6, "curvature": 5000, "tuned": 5000, "images": 10000},
    needs=dict.fromkeys(SCALES, needs(MNIST, OTHERS)), seconds=(28, 900),
)
def table_7_1(results: Results) -> Iterator[Row]:
    yield from _resnets("frequency", PAIRS, [0.998, 0.925, 0.832, 0.999, 0.668, 0.653, 0.662, 0.214, 0.166])
    yield Claim("nearly always where it was trained",
                "It holds of more than 99 % of images of the training set's kind, by the published definition.",
                "frequency_test_published > 0.99", "table 7.1")
    yield Claim("less often elsewhere",
                "It holds less often on every other kind, as in every row of the table, by the published definition.",
                require_all("frequency_{}_published < frequency_test_published", *OTHERS), "table 7.1")
    yield Claim("less often elsewhere, rightly", "It holds less often on every other kind with the right covariance.",
                require_all("frequency_{} < frequency_test", *OTHERS))


@bridge.recipe(
    "tables-5.1-7.3",
    title="Tables 5.1, 7.2 and 7.3: a network on digits sees other images, by samples and by the bridge, with honest times",
    where="tables 5.1, 7.2 and 7.3, section 5.2; measured are the rows of networks on MNIST",
    note="Published: the precision in the place of a covariance, with a curvature that is a mean over images; right: the "
         "diagonal of (N H + tau)^-1 with tau such that samples are 5 % less confident than the network on training images. "
         "Published times are of the sampling loop and of the bridge alone; right ones include the network and the Gaussian of "
         "its logits in both. The published +- are standard deviations of 5 seeds, here over sqrt(5).",
    experiment=Experiment("bridge_digits", "digit-bridge"), settings={"draws": 1000, "weight_draws": 100},
    quick={"train": 3000, "epochs": 3, "curvature": 200, "images": 150, "weight_images": 50, "repeats": 1},
    paper={"train": 60000, "epochs": 6, "curvature": 5000, "images": 10000, "weight_images": 1000, "repeats": 5},
    needs=dict.fromkeys(SCALES, needs(MNIST, OTHERS)), seconds=(35, 4000),
)
def tables_5_1_7_3(results: Results) -> Iterator[Row]:
    for name, score, published, errors in (
        ("samples", "mmc_sample", [0.932, 0.407, 0.535, 0.5], [0.0031, 0.0045, 0.0080, 0.0063]),
        ("samples", "auroc_sample", [0.989, 0.958, 0.974], [0.0009, 0.0027, 0.0022]),
        ("bridge", "mmc_bridge", [0.987, 0.377, 0.63, 0.63], [0.0004, 0.0085, 0.0080, 0.0080]),
        ("bridge", "auroc_bridge", [0.994, 0.962, 0.975], [0.0009, 0.0031, 0.0018]),
        ("100 samples of all weights", "mmc_weights", [0.981, 0.482, 0.643, 0.617], [0.0, 0.0009, 0.0009, 0.0013]),
        ("100 samples of all weights", "auroc_weights", [0.991, 0.96, 0.976], [0.0, 0.0004, 0.0004]),
    ):
        data = [one for one in SEEN if one != "test" or score.startswith("mmc")]
        is_whole = score.endswith("weights")
        ours = [f"{score}_{one}" if is_whole else (f"{score}_published_{one}", f"{score}_{one}") for one in data]
        because = "the text gives no variances for this table" if is_whole else (
            "the released curvature is an average over batches of inverses")
        cells = zip([SEEN[one] for one in data], zip(published, errors, strict=True), ours, strict=True)
        yield from column(f"{score.partition('_')[0].upper()}, {name}", cells, tolerance=0.05 if score.startswith("mmc") else 0.02,
                          because=f"{RETRAINED}, and {because}", count=5,
                          not_at={"quick": "quick has a network that was trained on 3,000 of the 60,000 images"})
    for name, published, errors in (
        ("MMC, samples", [0.949, 0.724, 0.659, 0.986, 0.537, 0.543, 0.527, 0.276, 0.348],
         [0.0004, 0.0009, 0.0125, 0.0, 0.0054, 0.004, 0.0018, 0.0018, 0.0063]),
        ("AUROC, samples", [0.884, 0.931, 0.995, 0.994, 0.707, 0.647], [0.0018, 0.0031, 0.0, 0.0, 0.0018, 0.0049]),
        ("MMC, bridge", [0.969, 0.774, 0.704, 0.991, 0.392, 0.4, 0.263, 0.068, 0.074],
         [0.0009, 0.0013, 0.0161, 0.0, 0.0072, 0.0058, 0.0013, 0.0013, 0.0054]),
        ("AUROC, bridge", [0.858, 0.923, 0.996, 0.996, 0.703, 0.661], [0.0018, 0.0036, 0.0, 0.0, 0.0013, 0.0058]),
    ):
        yield from _resnets(f"table 5.1: {name}", PAIRS_5_1, published, errors, count=5)
    for name, published, some_errors in (
        ("MMC, diagonal samples", [0.948, 0.708, 0.643, 0.986, 0.595, 0.593, 0.762, 0.467, 0.461], ()),
        ("AUROC, diagonal samples", [0.889, 0.933, 0.984, 0.984, 0.788, 0.795], ()),
        ("MMC, Kronecker samples", [0.857, 0.562, 0.484, 0.947, 0.46, 0.458, 0.404, 0.213, 0.18],
         [0.0013, 0.0013, 0.0018, 0.0009, 0.0018, 0.0018, None, None, 0.0004]),
        ("AUROC, Kronecker samples", [0.88, 0.939, 0.986, 0.986, 0.788, 0.838],
         [0.0054, 0.0004, 0.0004, 0.0004, None, 0.0004]),
        ("MMC, Dirichlet mode", [0.966, 0.742, 0.647, 0.993, 0.526, 0.52, 0.59, 0.206, 0.17], ()),
        ("AUROC, Dirichlet mode", [0.866, 0.934, 0.985, 0.987, 0.791, 0.815], ()),
    ):
        yield from _resnets(f"table 7.2: {name}", PAIRS, published, some_errors)
    yield from column("times faster than 1000 samples", [("all networks, on average", 400, ("faster_alone", "faster_whole"))],
                      tolerance=0, because="of another machine no tolerance can be stated beforehand", not_at=dict.fromkeys(
                          SCALES, "a factor of time is of a machine and of what else runs on it; a claim has its order"))
    yield Claim("400 times faster", "The bridge is around 400 times faster: more than 100 times, of what the paper times.",
                "faster_alone > 100", "section 5.2")
    yield Claim("faster with all that it waits for",
                "With the network and the Gaussian of its logits it is still more than 10 times faster.", "faster_whole > 10")
    yield Claim("better AUROC on MNIST",
                "On MNIST the bridge has a better AUROC than samples on all three other sets, by the published definition.",
                require_all("auroc_bridge_published_{0} > auroc_sample_published_{0}", *OTHERS), "section 5.2")
    yield Claim("competitive", "With the right covariance its AUROC is no more than 0.1 below that of samples on each set.",
                require_all("auroc_bridge_{0} > auroc_sample_{0} - 0.1", *OTHERS), "section 5.2")
    yield Claim("the network alone is no worse",
                "The AUROC of the network alone is no more than 0.1 below that of the bridge on each set.",
                require_all("auroc_map_{0} > auroc_bridge_{0} - 0.1", *OTHERS))
