"""Sphinx: `make docs` writes the pages to build/docs; warnings are errors."""

from importlib.metadata import version as version_of

project = "tptopk"
author = "the tptopk authors"
copyright = author
version = release = version_of("tptopk")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.viewcode"]
myst_heading_anchors = 3
default_role = "literal"  # docstrings write code in single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # signatures say what is meant; types are in the source, one click away
autodoc_default_options = {"members": True}

html_theme = "furo"
html_title = f"tptopk {version}"
