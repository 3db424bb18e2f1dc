"""Megatron-core: a plan's parallel state, and its layers under Hugging Face names."""
