"""LLaDA's generate in its published signature, written from a description of it (semi-autoregressive remasking)."""

import torch


def shares(masks, steps):
    """How many positions each step commits, per row [B, steps]: an even share, one more in the first steps."""
    least, more = masks // steps, masks % steps
    return least[:, None] + (torch.arange(steps)[None] < more[:, None])


def with_noise(logits, temperature):
    """Logits whose argmax is a draw from softmax(logits / temperature)."""
    if temperature == 0:
        return logits
    logits = logits.to(torch.float64)
    uniform = torch.rand_like(logits)
    return logits.exp() / (-torch.log(uniform)) ** temperature


@torch.no_grad()
def generate(
    model,
    prompt,
    attention_mask=None,
    steps=128,
    gen_length=128,
    block_length=128,
    temperature=0.0,
    cfg_scale=0.0,
    remasking="low_confidence",
    mask_id=126336,
    logits_eos_inf=False,
    confidence_eos_eot_inf=False,
    eos_id=126081,
    eot_id=126348,
):
    """The published one has the last two ids as numbers in its code."""
    rows, length = prompt.shape
    x = torch.full((rows, length + gen_length), mask_id, dtype=torch.long).to(model.device)
    x[:, :length] = prompt
    if attention_mask is not None:
        new = torch.ones((rows, gen_length), dtype=attention_mask.dtype, device=model.device)
        attention_mask = torch.cat([attention_mask, new], dim=1)
    given = x != mask_id

    assert gen_length % block_length == 0
    blocks = gen_length // block_length
    assert steps % blocks == 0
    for block in range(blocks):
        first, last = length + block * block_length, length + (block + 1) * block_length
        counts = shares((x[:, first:last] == mask_id).sum(dim=1), steps // blocks)
        for step in range(steps // blocks):
            masked = x == mask_id
            if cfg_scale > 0:
                blind = torch.where(given, mask_id, x)
                double = torch.cat([attention_mask, attention_mask])
                own, without = model(torch.cat([x, blind]), attention_mask=double).logits.chunk(2)
                logits = without + (cfg_scale + 1) * (own - without)
            else:
                logits = model(x, attention_mask=attention_mask).logits
            if logits_eos_inf:
                logits[:, :, eos_id] = -torch.inf
            tokens = with_noise(logits, temperature).argmax(dim=-1)
            if confidence_eos_eot_inf:
                logits[:, :, [eos_id, eot_id]] = -torch.inf
            if remasking == "low_confidence":
                p = torch.softmax(logits, dim=-1)
                confidence = p.gather(-1, tokens[..., None])[..., 0]
            elif remasking == "random":
                confidence = torch.rand(tokens.shape)
            else:
                raise ValueError(f"remasking must be low_confidence or random, got {remasking!r}")
            confidence[:, last:] = -torch.inf
            confidence = torch.where(masked, confidence, -torch.inf)
            for row in range(rows):
                chosen = confidence[row].topk(int(counts[row, step])).indices
                x[row, chosen] = tokens[row, chosen]
    return x
