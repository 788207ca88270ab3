"""Read data sets by spec; data/kinds has one file for each kind (npz, idx, images, py)."""

from __future__ import annotations

from bnncli.data.arrays import FeatureArrays, read_feature_arrays
from bnncli.data.labels import (
    FROM_1,
    check_same_classes,
    columns_of_classes,
    common_task,
    matched_to,
    numbered_by_name,
    shows_several,
)
from bnncli.data.pixels import Augmentation, ImageCounts, Preprocess
from bnncli.data.prediction_files import HDF5_MAGIC, GivenFile, magic_of, read_given, read_labels, read_texts
from bnncli.data.prediction_files import divide as divide_given
from bnncli.data.shift import Shift
from bnncli.data.sound import Sound, at_rate, clip_of, is_clip
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
from bnncli.data.transform import Transform, Transformed

__all__ = [
    "FROM_1",
    "HDF5_MAGIC",
    "Augmentation",
    "Batch",
    "FeatureArrays",
    "GivenFile",
    "ImageCounts",
    "InputSplit",
    "Inputs",
    "Memory",
    "Preprocess",
    "Shift",
    "Sound",
    "Transform",
    "Transformed",
    "at_rate",
    "check_same_classes",
    "clip_of",
    "columns_of_classes",
    "common_task",
    "divide_given",
    "hold_out",
    "hold_out_rows",
    "is_clip",
    "load_split",
    "magic_of",
    "matched_to",
    "numbered_by_name",
    "open_stored",
    "parse_hold_out",
    "parse_split",
    "read_feature_arrays",
    "read_given",
    "read_labels",
    "read_texts",
    "shows_several",
]
