"""Megatron-core: the parallel state of a plan, and tensor-parallel layers under Hugging Face names."""
