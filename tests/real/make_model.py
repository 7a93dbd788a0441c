"""Writes a small Qwen3 with random weights to the folder named by the first
argument. It needs no tokenizer: prompts are token ids below 32,000. What it
says means nothing; its KV cache works like that of any model."""

import sys

import torch
import transformers

torch.manual_seed(20260101)
config = transformers.Qwen3Config(
    vocab_size=32_000,
    max_position_embeddings=32_768,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=64,
    tie_word_embeddings=True,
    bos_token_id=1,
    eos_token_id=2,
)
model = transformers.Qwen3ForCausalLM(config).to(torch.bfloat16)
model.save_pretrained(sys.argv[1], safe_serialization=True)
