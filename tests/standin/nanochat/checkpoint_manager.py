"""Loads a checkpoint as strictly as nanochat does: the model is made without memory, and takes the saved tensors."""

import json
import os

import torch

from nanochat.gpt import GPT, GPTConfig
from nanochat.tokenizer import get_tokenizer


def build_model(checkpoint_dir, step, device, phase):
    state = torch.load(os.path.join(checkpoint_dir, f"model_{step:06d}.pt"), map_location=device)
    with open(os.path.join(checkpoint_dir, f"meta_{step:06d}.json")) as file:
        meta = json.load(file)
    config = GPTConfig(**meta["model_config"])
    with torch.device("meta"):
        model = GPT(config)
    model.to_empty(device=device)
    model.init_weights()
    model.load_state_dict(state, strict=True, assign=True)
    model.train(phase == "train")
    tokenizer = get_tokenizer()
    assert tokenizer.get_vocab_size() == meta["model_config"]["vocab_size"]
    return model, tokenizer, meta
