"""The list of commands: name, help, arguments, options, examples. The Typer application is made from it."""

from __future__ import annotations

from dataclasses import dataclass

from bnncli import options as o

COMPUTE = (o.ComputeOptions, o.RecordOptions, o.WriteOptions, o.LockOptions, o.RunOptions, o.CommonOptions)
READ = (o.RunOptions, o.CommonOptions)


@dataclass(frozen=True)
class Argument:
    """A positional argument; `is_many` takes one or more, `is_optional` none or one."""

    name: str
    help: str
    is_many: bool = False
    is_optional: bool = False


CKPT = Argument("ckpt", "The checkpoint; its artifacts lie in the run folder CKPT.bnn beside it.")


@dataclass(frozen=True)
class Command:
    """One subcommand. `stage` is the module of bnncli.stages whose `run` does the work."""

    name: str
    summary: str
    details: str
    groups: tuple[type, ...]
    examples: tuple[str, ...]
    arguments: tuple[Argument, ...] = (CKPT,)
    parent: str = ""

    @property
    def stage(self) -> str:
        """Module name in bnncli.stages."""
        return self.name.replace("-", "_")


COMMANDS = (
    Command(
        "extract-features",
        "Run the network over the data once, and keep penultimate features and the last linear layer.",
        "Writes features/<split>.h5 for every split and posteriors/map.safetensors, the network as trained. Every later "
        "command works from these files and needs no network code. The last linear layer is found, and proved: features "
        "times head must equal the network's output.",
        (o.ExtractFeaturesOptions, *COMPUTE),
        (
            "bnncli extract-features ckpt.pt --model lenet5 --data train=npz:train.npz --data test=npz:test.npz --hold-out val=test:2000 --ood mnist=npz:mnist.npz",
            "bnncli extract-features ckpt.pt --model net.py:make --model-arg width=4 --data train=images:train --resize 256 --crop 224",
            "bnncli extract-features myrun --from-npz features.npz",
        ),
    ),
    Command(
        "fit-laplace",
        "Fit a Gaussian posterior over the last layer.",
        "Finds the mode of the target by Newton's method, to within 0.001 posterior standard deviations (the Newton "
        "decrement, all parameters together), and puts the Laplace approximation there. The prior "
        "precision is chosen on the val split (data that the network was not trained on) or by the marginal likelihood, "
        "unless a number is given. Biases have the weights' unless --bias-precision gives them their own. Writes "
        "posteriors/laplace.safetensors.",
        (o.FitLaplaceOptions, o.NameOptions, *COMPUTE),
        (
            "bnncli fit-laplace ckpt.pt",
            "bnncli fit-laplace ckpt.pt --structure kron --prior-precision 510 --name kron",
            "bnncli fit-laplace ckpt.pt --bias-precision 0.1 --name weak-bias",
            "bnncli fit-laplace ckpt.pt --plot prior-precision.png",
        ),
    ),
    Command(
        "fit-temperature",
        "Scale the network's logits by the one temperature that the val split prefers.",
        "The plain baseline of calibration: divides the last layer by T, which minimises the NLL of the val split (labelled "
        "data that the network was not trained on). Confidence changes, the predicted class does not. Writes "
        "posteriors/temperature.safetensors, which predict uses as a single network.",
        (o.FitTemperatureOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli fit-temperature ckpt.pt",
            "bnncli fit-temperature ckpt.pt --base laplace --name laplace-temperature",
        ),
    ),
    Command(
        "refine",
        "Refine a Gaussian posterior with a normalizing flow.",
        "Maximises the ELBO of a flow pushed from the base Gaussian and says, with standard errors, whether it helped. "
        "Writes posteriors/refine.safetensors.",
        (o.RefineOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli refine ckpt.pt",
            "bnncli refine ckpt.pt --flow radial --length 5 --epochs 20",
            "bnncli refine ckpt.pt --base prior --name naive",
        ),
    ),
    Command(
        "hmc",
        "Draw from the exact posterior by Hamiltonian Monte Carlo.",
        "All chains run as one batch, in coordinates whitened by the Gaussian at the mode. Reports the largest "
        "rank-normalised split R-hat and the smallest effective sample size, of parameters and of predictions on the val "
        "split. An interrupted run is continued with --resume. Writes posteriors/hmc.nc, which ArviZ opens.",
        (o.HmcOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli hmc ckpt.pt",
            "bnncli hmc ckpt.pt --chains 32 --draws 100 --max-rhat 1.01",
            "bnncli hmc ckpt.pt --until 'rhat<=1.01,ess>=1000' --resume",
        ),
    ),
    Command(
        "fit-lbbnn",
        "Fit a latent binary network: every weight is in or out with a probability of its own.",
        "Maximises a bound on the evidence of a spike-and-slab network on the features: the last layer alone, or with "
        "--hidden a network of its own, on raw inputs after extract-features --model flatten. Reports the parts of the bound "
        "and the density. Writes posteriors/lbbnn.safetensors.",
        (o.FitLbbnnOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli fit-lbbnn ckpt.pt",
            "bnncli fit-lbbnn mnist --hidden 400,600 --estimator lrt --epochs 250",
            "bnncli fit-lbbnn ckpt.pt --estimator mnf --name sparse --resume",
        ),
    ),
    Command(
        "prune",
        "Write the network that a latent binary network's inclusion probabilities leave over.",
        "Keeps the weights that are in with probability above 1/2 (the median probability model), or the most probable ones "
        "down to a target density, at their mean. Says what accuracy is kept. Writes posteriors/<posterior>-sparse.safetensors, "
        "compressed by rows, which predict takes as a single network; with --dense also an ordinary state dict.",
        (o.PruneOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli prune ckpt.pt",
            "bnncli prune mnist --rule density --density 0.01 --out sparse.safetensors",
            "bnncli prune mnist --dense pruned.safetensors",
        ),
    ),
    Command(
        "predict",
        "Turn posteriors into class probabilities.",
        "Predicts every split but train with every posterior of the run, or those named. Several integrators may be asked "
        "for; each setting goes to those that have it and, where it is not the default, into the name: mc with --qmc is "
        "mc-qmc. Writes predictions/<posterior>.<integrator>/<split>.h5.",
        (o.PredictOptions, o.NameOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli predict ckpt.pt",
            "bnncli predict ckpt.pt --posterior refine --integrator mc --samples 100 --split test",
            "bnncli predict ckpt.pt --posterior laplace --integrator all --split test",
        ),
    ),
    Command(
        "evaluate",
        "Score predictions: accuracy, NLL, Brier, ECE, OOD detection, distance to HMC.",
        "One row for each posterior, integrator and in-distribution split. Numbers with all the choices that define them "
        "are in metrics/<posterior>.<integrator>.json and in --json. Undefined scores are null with a reason. Scores of the "
        "features alone (--score knn) have a row called features, in metrics/features.none.json. An assertion "
        "(--assert) without a posterior is about every one but that on its right; without a split about test; without "
        "choices about the usual form of a score.",
        (o.EvaluateOptions, o.InputOptions, *COMPUTE),
        (
            "bnncli evaluate ckpt.pt",
            "bnncli evaluate ckpt.pt --split test --json | jq '.rows[].posterior'",
            "bnncli evaluate ckpt.pt --plot figures",
            "bnncli evaluate ckpt.pt --score max_prob --score energy --score knn",
            "bnncli evaluate ckpt.pt --assert 'ece<=0.02' --assert 'laplace.mc.nll<map.nll'",
        ),
    ),
    Command(
        "compare",
        "Compare posteriors: each score with its standard error, the best ones marked, or differences from a baseline.",
        "One checkpoint: standard errors and tests by a bootstrap over examples, the same ones for all posteriors. Several "
        "checkpoints, seeds of one experiment: means and standard errors over checkpoints, and paired t tests, which find "
        "little with two or three. Marked (* in text) are the best of each column and all that are not significantly worse "
        "than another: in each column, posteriors whose true scores are equally best are all marked but for a chance of "
        "--alpha, however many are compared. With --baseline: those that differ from it, by Holm's adjustment; the p-value "
        "is the share of bootstrap differences that lie as far from the difference observed as that lies from zero, itself "
        "counted. Reads predictions; --plot alone writes.",
        (o.CompareOptions, o.InputOptions, o.WriteOptions, *READ),
        (
            "bnncli compare ckpt.pt",
            "bnncli compare ckpt.pt --baseline map --metric nll --metric ece:equal-mass",
            "bnncli compare seed-1.pt seed-2.pt seed-3.pt --format latex > table.tex",
            "bnncli compare seed-*.pt --plot figures",
        ),
        (
            Argument(
                "ckpt", "Checkpoints whose predictions are compared; several are seeds of one experiment.", is_many=True
            ),
        ),
    ),
    Command(
        "diagnose",
        "Judge every posterior against its target: ELBO, Pareto k, evidence, R-hat, MMD^2; say which to use.",
        "A Gaussian or flow is good when its log importance weights spread by at most 2 nats and Pareto k is below its "
        "threshold; draws are good with R-hat at most 1.05, 400 effective draws and no divergence. Fit to the target and "
        "prediction (NLL on the val split) are told apart. Nothing is written.",
        (o.DiagnoseOptions, o.InputOptions, o.ComputeOptions, *READ),
        ("bnncli diagnose ckpt.pt", "bnncli diagnose ckpt.pt --posterior laplace --strict --json | jq .verdict"),
    ),
    Command(
        "integrals",
        "Measure each integrator against the exact integral, with no checkpoint.",
        "Integrates a Gaussian over one logit (two classes) or several (softmax) with every integrator as predict would, and "
        "shows how far each is from the exact probabilities (quadrature; from four logits on, scrambled Sobol points "
        "where a product rule would need too many nodes). Without --mean: largest and mean error over a grid of means and standard "
        "deviations of one logit, drawn with --plot.",
        (o.IntegralsOptions, o.ComputeOptions, o.CommonOptions),
        (
            "bnncli integrals --mean 1.7 --variance 4",
            "bnncli integrals --mean 2,0,-1 --covariance '2,1,0;1,2,0;0,0,1' --samples 1000",
            "bnncli integrals --plot errors.png",
        ),
        (),
    ),
    Command(
        "status",
        "List the artifacts of a run: fresh, stale, missing or invalid.",
        "An artifact is stale when an input it was made from has changed since, by content.",
        (o.StatusOptions, *READ),
        ("bnncli status ckpt.pt", "bnncli status ckpt.pt --check || bnncli fit-laplace ckpt.pt"),
    ),
    Command(
        "inspect",
        "Show what a file is: kind, shapes, parameters, provenance, digests.",
        "Works on checkpoints and artifacts. Never runs code from the file.",
        (o.CommonOptions,),
        ("bnncli inspect ckpt.pt", "bnncli inspect ckpt.pt.bnn/posteriors/laplace.safetensors --json"),
        (Argument("file", "A checkpoint or an artifact."),),
    ),
    Command(
        "verify",
        "Check artifacts in full: digest and every invariant. Exit 65 when one is bad.",
        "Reads every byte; `inspect` and `status` read headers only.",
        (o.CommonOptions,),
        ("bnncli verify ckpt.pt.bnn", "bnncli verify ckpt.pt.bnn/features/*.h5"),
        (Argument("file", "Artifacts, or folders of them, to check.", is_many=True),),
    ),
    Command(
        "convert",
        "Write a checkpoint's weights as a safetensors state dict.",
        "The only command that may unpickle code, and only with --trust-pickle.",
        (o.ConvertOptions, o.WriteOptions, o.CommonOptions),
        ("bnncli convert ckpt.ckpt ckpt.safetensors --trust-pickle",),
        (Argument("source", "The checkpoint."), Argument("target", "The safetensors file to write.")),
    ),
    Command(
        "clean",
        "Remove what dead runs left behind: temporary files and resume states. Never an artifact.",
        "Files of processes that still run are kept.",
        (*READ,),
        ("bnncli clean ckpt.pt",),
    ),
    Command(
        "demo",
        "Run the whole pipeline on the embedded Fashion-MNIST case, into ./bnncli-demo/.",
        "A LeNet-5 and subsets of Fashion-MNIST and MNIST travel with the package; under a minute on two cores.",
        (o.DemoOptions, o.ComputeOptions, o.CommonOptions),
        ("bnncli demo",),
        (),
    ),
    Command(
        "config-show",
        "Print the value of every option of a command, and where it comes from.",
        "Flags win over environment variables (BNNCLI_<COMMAND>_<OPTION>), these over the configuration file, this over "
        "the defaults.",
        (o.CommonOptions,),
        ("bnncli config show refine", "BNNCLI_REFINE_EPOCHS=5 bnncli config show refine --json"),
        (Argument("of", "A command; all when not given.", is_optional=True),),
        parent="config",
    ),
)
