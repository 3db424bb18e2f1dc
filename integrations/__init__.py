"""What runs a plan: DeepSpeed's engine, Megatron-core's layers, Hugging Face's models."""
