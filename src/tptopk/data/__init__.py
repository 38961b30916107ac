"""Benchmarks in their official layouts, and records of one's own in files and folders. Private training needs none of it."""

from tptopk.data.constants import normalised
from tptopk.data.download import fetch
from tptopk.data.files import findings, read_archive
from tptopk.data.images import read_folder
from tptopk.data.sources import load
from tptopk.data.tables import read_schema, read_table

__all__ = ["fetch", "findings", "load", "normalised", "read_archive", "read_folder", "read_schema", "read_table"]
