"""Megatron-core: a plan's parallel state, and its layers under Hugging Face names."""

import warnings

with warnings.catch_warnings():
    # Its optimizers say on every rank that Transformer Engine and Apex are missing; none is used.
    warnings.filterwarnings("ignore", message="Transformer Engine and Apex are not installed")
    import megatron.core.tensor_parallel  # noqa: F401
