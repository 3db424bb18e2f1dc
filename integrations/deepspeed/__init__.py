"""DeepSpeed: the hooked `initialize`, the batch exchange, and engines that run a plan."""
