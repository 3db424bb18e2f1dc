"""Hugging Face models: their structure, their shards and stages, their checkpoints."""
