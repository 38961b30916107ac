"""Networks for the benchmarks, and `fix` for models that come with BatchNorm. Private training needs none of them."""
