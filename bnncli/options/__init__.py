"""Every option of every command, written once: name, type, default, help, and whether it changes numbers.

The command line, the environment variables, the configuration file and the parameters recorded in artifacts are all
made from these classes. A field named prior_precision is the option --prior-precision.
"""

from bnncli.options.acquire import AcquireOptions as AcquireOptions
from bnncli.options.auto import AutoOptions as AutoOptions
from bnncli.options.calibrate import CalibrateOptions as CalibrateOptions
from bnncli.options.common import CommonOptions as CommonOptions
from bnncli.options.common import ComputeOptions as ComputeOptions
from bnncli.options.common import InputOptions as InputOptions
from bnncli.options.common import LockOptions as LockOptions
from bnncli.options.common import NameOptions as NameOptions
from bnncli.options.common import RecordOptions as RecordOptions
from bnncli.options.common import RunOptions as RunOptions
from bnncli.options.common import WriteOptions as WriteOptions
from bnncli.options.compare import CompareOptions as CompareOptions
from bnncli.options.convert import ConvertOptions as ConvertOptions
from bnncli.options.demo import DemoOptions as DemoOptions
from bnncli.options.diagnose import DiagnoseOptions as DiagnoseOptions
from bnncli.options.evaluate import EvaluateOptions as EvaluateOptions
from bnncli.options.export import ExportOptions as ExportOptions
from bnncli.options.extract_features import ExtractFeaturesOptions as ExtractFeaturesOptions
from bnncli.options.fit_ensemble import FitEnsembleOptions as FitEnsembleOptions
from bnncli.options.fit_laplace import FitLaplaceOptions as FitLaplaceOptions
from bnncli.options.fit_lbbnn import FitLbbnnOptions as FitLbbnnOptions
from bnncli.options.fit_sghmc import FitSghmcOptions as FitSghmcOptions
from bnncli.options.fit_swag import FitSwagOptions as FitSwagOptions
from bnncli.options.fit_temperature import FitTemperatureOptions as FitTemperatureOptions
from bnncli.options.fit_vi import FitViOptions as FitViOptions
from bnncli.options.grid import GridOptions as GridOptions
from bnncli.options.hmc import HmcOptions as HmcOptions
from bnncli.options.integrals import IntegralsOptions as IntegralsOptions
from bnncli.options.merge import MergeOptions as MergeOptions
from bnncli.options.predict import PredictOptions as PredictOptions
from bnncli.options.prune import PruneOptions as PruneOptions
from bnncli.options.refine import RefineOptions as RefineOptions
from bnncli.options.report import ReportOptions as ReportOptions
from bnncli.options.reproduce import ReproduceOptions as ReproduceOptions
from bnncli.options.sbc import SbcOptions as SbcOptions
from bnncli.options.score import ScoreOptions as ScoreOptions
from bnncli.options.stack import StackOptions as StackOptions
from bnncli.options.status import StatusOptions as StatusOptions
from bnncli.options.train import TrainOptions as TrainOptions
