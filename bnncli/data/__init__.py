"""Read data sets by spec; data/kinds has one file for each kind (npz, idx, images, py)."""

from __future__ import annotations

from bnncli.data.arrays import FeatureArrays, read_feature_arrays
from bnncli.data.labels import (
    FROM_1,
    alphabetical_numbering,
    check_same_classes,
    columns_of_classes,
    common_task,
    is_multi_label,
    match_classes,
)
from bnncli.data.pixels import Augmentation, ImageCounts, Preprocess
from bnncli.data.prediction_files import (
    HDF5_MAGIC,
    FilePredictions,
    read_given_predictions,
    read_labels,
    read_magic,
    read_texts,
)
from bnncli.data.prediction_files import split_prediction_place as divide_given
from bnncli.data.shift import Shift
from bnncli.data.sound import Sound, convert_clip, is_clip, resample
from bnncli.data.splits import (
    Batch,
    Inputs,
    InputSplit,
    Memory,
    hold_out,
    hold_out_rows,
    load_split,
    open_stored,
    parse_hold_out,
    parse_split,
)
from bnncli.data.transform import Transform, TransformedInputs

__all__ = [
    "FROM_1",
    "HDF5_MAGIC",
    "Augmentation",
    "Batch",
    "FeatureArrays",
    "FilePredictions",
    "ImageCounts",
    "InputSplit",
    "Inputs",
    "Memory",
    "Preprocess",
    "Shift",
    "Sound",
    "Transform",
    "TransformedInputs",
    "alphabetical_numbering",
    "check_same_classes",
    "columns_of_classes",
    "common_task",
    "convert_clip",
    "divide_given",
    "hold_out",
    "hold_out_rows",
    "is_clip",
    "is_multi_label",
    "load_split",
    "match_classes",
    "open_stored",
    "parse_hold_out",
    "parse_split",
    "read_feature_arrays",
    "read_given_predictions",
    "read_labels",
    "read_magic",
    "read_texts",
    "resample",
]
