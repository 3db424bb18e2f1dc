"""Train a byte-level causal language model on the source code of Python's standard library.

A plain DeepSpeed script, started with the `deepspeed` launcher:

    deepspeed --num_gpus 4 examples/train_clm.py --deepspeed_config examples/ds_autoplan.json

It saves a Hugging Face checkpoint at the end, opens it again and completes a line of Python.
"""

import argparse
import sysconfig
from pathlib import Path

import deepspeed
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM


class LibraryText(Dataset):
    """Windows of `seq_length` bytes of the standard library's source."""

    def __init__(self, seq_length: int, max_bytes: int):
        text = bytearray()
        for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
            text += path.read_bytes()
            if len(text) >= max_bytes:
                break
        tokens = torch.tensor(list(text[:max_bytes]), dtype=torch.long)
        self.windows = tokens[: len(tokens) // seq_length * seq_length].view(-1, seq_length)

    def __len__(self):
        return len(self.windows)

    def __getitem__(self, index):
        window = self.windows[index]
        return {"input_ids": window, "labels": window}


def parse_arguments():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--local_rank", type=int, default=-1)
    parser.add_argument("--seq_length", type=int, default=128)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--out", default="runs/train_clm")
    parser.add_argument("--seed", type=int, default=1234)
    return deepspeed.add_config_arguments(parser).parse_args()


def complete(path, prompt, length=48):
    """Complete `prompt` with the saved model, greedily."""
    model = AutoModelForCausalLM.from_pretrained(path)
    tokens = torch.tensor([list(prompt.encode())])
    output = model.generate(tokens, max_new_tokens=length, do_sample=False)
    return bytes(output[0].tolist()).decode(errors="replace")


def main():
    args = parse_arguments()
    torch.manual_seed(args.seed)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=args.hidden_size,
        intermediate_size=args.hidden_size * 8 // 3,
        num_hidden_layers=args.layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=args.seq_length,
        bos_token_id=None,
        eos_token_id=None,
    )
    model = LlamaForCausalLM(config)
    engine, _, _, _ = deepspeed.initialize(
        args=args, model=model, model_parameters=model.parameters()
    )

    batch_size = engine.train_micro_batch_size_per_gpu()
    steps_per_update = engine.gradient_accumulation_steps()
    samples = args.steps * batch_size * steps_per_update * dist.get_world_size()
    dataset = LibraryText(args.seq_length, samples * args.seq_length)
    sampler = DistributedSampler(dataset, shuffle=True, seed=args.seed)
    loader = DataLoader(dataset, batch_size=batch_size, sampler=sampler, drop_last=True)

    engine.train()
    for step, batch in enumerate(loader):
        batch = {name: value.to(engine.device) for name, value in batch.items()}
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        if step % 20 == 0 or step == len(loader) - 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:4d}  loss {mean.item() / dist.get_world_size():.4f}", flush=True)

    if dist.get_rank() == 0:
        model.save_pretrained(args.out)
        prompt = "import os\nimport sys\n\n\ndef main("
        print(f"saved {args.out}; it completes:\n{complete(args.out, prompt)}", flush=True)


if __name__ == "__main__":
    main()
