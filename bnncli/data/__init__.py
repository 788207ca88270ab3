"""Data by name: one file in this folder for each kind of spec (npz, idx, images, py)."""

from __future__ import annotations

from bnncli.data._augment import Augmentation
from bnncli.data._classes import check_same_classes, columns_of_classes, matched_to, numbered_by_name
from bnncli.data._feature_arrays import FeatureArrays, read_feature_arrays
from bnncli.data._given import HDF5_MAGIC, GivenFile, magic_of, read_given, read_labels, read_texts
from bnncli.data._given_columns import divide as divide_given
from bnncli.data._hold_out import hold_out, hold_out_rows, parse_hold_out
from bnncli.data._known import Memory
from bnncli.data._labels import FROM_1, common_task, shows_several
from bnncli.data._preprocess import ImageCounts, Preprocess
from bnncli.data._shift import Shift
from bnncli.data._sound import Sound, at_rate, clip_of, is_clip
from bnncli.data._spec import load_split, open_stored, parse_split
from bnncli.data._split import Batch, Inputs, InputSplit
from bnncli.data._transform import Transform, Transformed

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
