"""From a batch to a clipped sum: per-example gradients on a support, by three engines that must agree."""
