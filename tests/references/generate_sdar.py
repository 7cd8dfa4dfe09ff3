"""SDAR's block_diffusion_generate in its published signature, written from a description of it: with its faults, that
temperature 0 divides by zero, and that more positions than there are masks overwrite what is known."""

import torch
from transformers import DynamicCache


def draw(logits, temperature, top_k, top_p):
    """A token per position of logits [B, T, V], and its probability."""
    if temperature != 1.0:
        logits = logits / temperature
    if top_k > 0:
        least = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p < 1.0:
        ordered, order = logits.sort(dim=-1, descending=True)
        p = ordered.softmax(dim=-1)
        cut = (p.cumsum(dim=-1) - p > top_p).scatter(-1, order, p.cumsum(dim=-1) - p > top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    p = logits.softmax(dim=-1)
    tokens = torch.multinomial(p.reshape(-1, p.shape[-1]), num_samples=1).reshape(p.shape[:-1])
    return tokens, p.gather(-1, tokens[..., None])[..., 0]


@torch.no_grad()
def block_diffusion_generate(
    model,
    prompt,
    mask_id,
    gen_length=128,
    block_length=8,
    denoising_steps=8,
    temperature=1.0,
    top_k=0,
    top_p=1.0,
    remasking_strategy="low_confidence_dynamic",
    confidence_threshold=0.85,
    eb_threshold=None,
    stopping_criteria_idx=None,
):
    model.eval()
    ids = prompt["input_ids"]
    length = ids.shape[1]
    cache = DynamicCache()
    blocks = -(-(length + gen_length) // block_length)
    number = torch.arange(blocks * block_length, device=model.device) // block_length
    visible = (number[None] <= number[:, None]).to(torch.float32)[None, None]
    positions = torch.arange(blocks * block_length, device=model.device)[None]
    x = torch.full((1, blocks * block_length), mask_id, dtype=torch.long, device=model.device)
    x[:, :length] = ids

    def forward(first, last, store):
        return model(
            x[:, first:last],
            attention_mask=visible[:, :, first:last, :last],
            position_ids=positions[:, first:last],
            past_key_values=cache,
            use_cache=True,
            store_kv=store,
        )

    done = length // block_length
    if done:
        forward(0, done * block_length, True)
    counts = [block_length // denoising_steps + (i < block_length % denoising_steps) for i in range(denoising_steps)]
    for block in range(done, blocks):
        first, last = block * block_length, (block + 1) * block_length
        for step in range(denoising_steps + 1):
            masked = x[0, first:last] == mask_id
            if not masked.any():
                forward(first, last, True)
                break
            tokens, p = draw(forward(first, last, False).logits, temperature, top_k, top_p)
            tokens, p = tokens[0], p[0].masked_fill(~masked, -torch.inf)
            if remasking_strategy == "sequential":
                chosen = masked.nonzero()[: counts[step], 0]
            elif remasking_strategy == "low_confidence_static":
                chosen = p.topk(counts[step]).indices
            elif remasking_strategy == "low_confidence_dynamic":
                sure = (p > confidence_threshold).nonzero()[:, 0]
                chosen = sure if len(sure) >= counts[step] else p.topk(counts[step]).indices
            else:
                raise ValueError(f"unknown remasking_strategy {remasking_strategy}")
            x[0, first + chosen] = tokens[chosen]
        if stopping_criteria_idx and any(stop in x[0, length:last] for stop in stopping_criteria_idx):
            break
    return x
