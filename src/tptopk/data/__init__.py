"""Benchmark data: embedded digits and files in their usual layouts. Private training needs none of it."""
