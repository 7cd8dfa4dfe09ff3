"""Train the demo checkpoint from scratch: a masked diffusion model of 2.5 million parameters, on two CPU cores.

    python examples/train_demo.py --output mlx_dllm_plugin/demo/run       # about an hour; --resume goes on
    python examples/train_demo.py --evaluate choose                       # score the last checkpoint

Two processes of one thread each average their gradients. Needs torch, tokenizers and safetensors.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from demo_problems import TASKS, Problem, check_disjoint, problems, stream, vocabulary
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor, nn

WIDTH, LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN = 192, 6, 6, 3, 32, 512
THETA, EPS, CONTEXT, CANVAS = 10_000.0, 1e-6, 256, 64
EOS, MASK, USER, ASSISTANT, SYSTEM = "<|endoftext|>", "<|mdlm_mask|>", "<|user|>", "<|assistant|>", "<|system|>"
SPECIALS = (EOS, MASK, USER, ASSISTANT, SYSTEM)
TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] | trim }}"
    "{% if message['role'] == 'assistant' %}{{ '<|endoftext|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
TOKENIZER_CODE = '''"""Loads tokenizer.json as it is, for callers that say trust_remote_code=True."""

from transformers import PreTrainedTokenizerFast


class DemoTokenizer(PreTrainedTokenizerFast):
    pass
'''
SYSTEM_PROMPTS = ("You are a helpful assistant.", "Be brief.", "Answer the question.")
WEIGHTS = {
    "add": 3.0, "subtract": 4.5, "reverse": 1.5, "reverse_words": 1.2, "sort": 3.2,
    "case": 1.4, "count": 1.8, "next": 0.5, "json": 1.4, "sentence": 0.7,
}  # fmt: skip
# Canvas lengths of training batches and their shares. Short ones train faster, long ones teach the tail.
CANVASES = {32: 0.34, 48: 0.42, 64: 0.22, 128: 0.02}
THRESHOLD = 0.9


def build_tokenizer() -> Tokenizer:
    """Bytes, the words of the phrasings, and the special tokens; digits and unknown words fall to single bytes."""
    pieces = r" ?\p{L}+| ?[^\s\p{L}\p{N}]+|\p{N}|\s"
    split = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = {byte: i for i, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    parts = {part for text in vocabulary() for part, _ in split.pre_tokenize_str(text)}
    words = {word for part in parts for word, _ in level.pre_tokenize_str(part)}
    for word in sorted(words - set(vocab)):
        vocab[word] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def render(prompt: str, system: str = "") -> str:
    """What the chat template makes of one question."""
    return (SYSTEM + system if system else "") + USER + prompt + ASSISTANT


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, HEADS * HEAD)
        self.k_proj = nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.v_proj = nn.Linear(WIDTH, KV_HEADS * HEAD)
        self.o_proj = nn.Linear(HEADS * HEAD, WIDTH, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, _ = x.shape
        q = _rotate(self.q_proj(x).view(b, t, HEADS, HEAD).transpose(1, 2), cos, sin)
        k = _rotate(self.k_proj(x).view(b, t, KV_HEADS, HEAD).transpose(1, 2), cos, sin)
        v = self.v_proj(x).view(b, t, KV_HEADS, HEAD).transpose(1, 2)
        k, v = (a.repeat_interleave(HEADS // KV_HEADS, dim=1) for a in (k, v))
        # Written out: on the CPU this trains three times as fast as scaled_dot_product_attention.
        scores = (q @ k.transpose(-1, -2)) * HEAD**-0.5
        return self.o_proj((scores.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, t, HEADS * HEAD))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.up_proj = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x.float()
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * self.weight


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = Norm()
        self.self_attn = Attention()
        self.post_attention_layernorm = Norm()
        self.mlp = Mlp()

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Trunk(nn.Module):
    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))
        self.norm = Norm()


class Model(nn.Module):
    """Qwen2 without a causal mask; parameter names as in transformers."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self.model = Trunk(vocab)
        frequencies = THETA ** (-torch.arange(0, HEAD, 2) / HEAD)
        angles = torch.outer(torch.arange(CONTEXT), frequencies).repeat(1, 2)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        for layer in self.model.layers:
            for last in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(last.weight, std=0.02 / (2 * LAYERS) ** 0.5)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.embed_tokens(ids)
        cos, sin = self.cos[: ids.shape[1]], self.sin[: ids.shape[1]]
        for layer in self.model.layers:
            x = layer(x, cos, sin)
        return F.linear(self.model.norm(x), self.model.embed_tokens.weight)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, dim=-1)
    return x * cos.to(x.dtype) + torch.cat((-two, one), dim=-1) * sin.to(x.dtype)


class Muon:
    """Muon for the matrices of the layers, one Newton-Schulz iteration for all matrices of a shape."""

    def __init__(self, parameters: list[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        self.groups: dict[tuple[int, ...], list[nn.Parameter]] = defaultdict(list)
        for parameter in parameters:
            self.groups[tuple(parameter.shape)].append(parameter)
        self.state = {shape: torch.zeros(len(group), *shape) for shape, group in self.groups.items()}

    @torch.no_grad()
    def step(self, rate: float) -> None:
        """One step; every process iterates on its share of the matrices."""
        updates = []
        for shape, group in self.groups.items():
            gradient = torch.stack([p.grad for p in group])  # type: ignore[misc]
            velocity = self.state[shape].mul_(self.momentum).add_(gradient)
            update = torch.zeros_like(gradient)
            mine = slice(dist.get_rank(), None, dist.get_world_size())
            update[mine] = _orthogonal(gradient[mine] + self.momentum * velocity[mine]).float()
            updates.append(update)
        flat = torch.cat([update.flatten() for update in updates])
        dist.all_reduce(flat)
        parts = flat.split([update.numel() for update in updates])
        for (shape, group), part in zip(self.groups.items(), parts, strict=True):
            for parameter, own in zip(group, part.view(-1, *shape), strict=True):
                parameter.mul_(1 - rate * self.decay).add_(own, alpha=-rate * 0.2 * max(shape) ** 0.5)


def _orthogonal(g: Tensor) -> Tensor:
    tall = g.shape[1] > g.shape[2]
    x = (g.transpose(1, 2) if tall else g).bfloat16()
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        a = x @ x.transpose(1, 2)
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.transpose(1, 2) if tall else x


def batches(
    tokenizer: Tokenizer, size: int, seed: int, rank: int, start: int
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Per step (masked canvas, targets, weights), each a function of seed, rank and step alone."""
    eos, mask = tokenizer.token_to_id(EOS), tokenizer.token_to_id(MASK)
    digits, equals = {tokenizer.token_to_id(digit) for digit in "0123456789"}, tokenizer.token_to_id("Ġ=")
    step = start
    while True:
        shared = random.Random(f"canvas|{seed}|{step}")
        length = shared.choices(tuple(CANVASES), tuple(CANVASES.values()))[0]
        own = random.Random(f"rows|{seed}|{step}|{rank}")
        draw = np.random.default_rng([seed, step, rank])
        source = stream("train", f"{seed}|{step}|{rank}", WEIGHTS)
        rows, prompts, ends, extra = [], [], [], []
        while len(rows) < size:
            problem = next(source)
            system = own.choice(SYSTEM_PROMPTS) if own.random() < 0.04 else ""
            prompt = tokenizer.encode(render(problem.prompt, system), add_special_tokens=False).ids
            answer = tokenizer.encode(problem.answer, add_special_tokens=False).ids
            if len(prompt) + len(answer) + 1 <= length:
                rows.append(prompt + answer + [eos] * (length - len(prompt) - len(answer)))
                prompts.append(len(prompt))
                ends.append(len(prompt) + len(answer) + 1)
                extra.append([0.0] * len(prompt) + computed(problem.task, answer, digits, equals))
                extra[-1] += [0.0] * (length - len(extra[-1]))
        target = np.array(rows)
        column = np.arange(length)[None]
        first, end = np.array(prompts)[:, None], np.array(ends)[:, None]
        tail = column >= end
        # 30 % of the rows are fully masked, as every canvas is at the start; the tail is often decided before or
        # after the answer, so its share of masks is drawn apart in half of the rest.
        share = draw.permutation((np.arange(size) + draw.random(size)) / size)[:, None]
        share = np.where(draw.random((size, 1)) < 0.3, 1.0, share)
        apart = draw.choice([0.0, 1.0, 0.5], size=(size, 1))
        tail_share = np.where((share < 1) & (draw.random((size, 1)) < 0.5), apart, share)
        hidden = (draw.random((size, length)) < np.where(tail, tail_share, share)) & (column >= first)
        weight = hidden * (np.where(tail, 0.1, 1.0) + np.array(extra))
        yield (
            torch.from_numpy(np.where(hidden, mask, target)),
            torch.from_numpy(target),
            torch.from_numpy(weight).float(),
        )
        step += 1


def computed(task: str, answer: list[int], digits: set[int], equals: int) -> list[float]:
    """Extra weight of the digits that must be computed: most other tokens of those answers are copied."""
    start = answer.index(equals) if task in ("add", "subtract") else 0 if task == "count" else len(answer)
    return [2.0 * (i >= start and token in digits) for i, token in enumerate(answer)]


def rate_at(progress: float, step: int) -> float:
    """Warm-up of 100 steps, constant to half of the run, then linear to zero."""
    return min(1.0, (step + 1) / 100) * min(1.0, max(0.0, (1 - progress) / 0.5))


def train(rank: int, args: argparse.Namespace, folder: str) -> None:
    """One of the training processes."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=args.processes)
    tokenizer = build_tokenizer()
    torch.manual_seed(args.seed)
    model = Model(tokenizer.get_vocab_size())
    matrices = [p for p in model.model.layers.parameters() if p.dim() == 2]
    chosen = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in chosen]
    muon, adam = Muon(matrices), torch.optim.AdamW(others, lr=args.rate, betas=(0.9, 0.98), weight_decay=0.0)
    step, before, wall_before = 0, 0.0, 0.0
    if args.resume and args.checkpoint.exists():
        saved = torch.load(args.checkpoint)
        model.load_state_dict(saved["model"])
        if not args.restart_schedule:
            muon.state = saved["muon"]
            adam.load_state_dict(saved["adam"])
        step, before, wall_before = saved["step"], saved["seconds"], saved["wall_seconds"]
    if args.compile:
        for layer in model.model.layers:
            layer.compile(dynamic=False)
    parameters = list(model.parameters())
    first = step if args.restart_schedule else 0
    spent, wall_spent = (before, wall_before) if args.restart_schedule else (0.0, 0.0)
    start, losses = time.monotonic(), []
    source = batches(tokenizer, args.batch // args.processes, args.seed, rank, step)
    while True:
        # The processor time of a process is what the wall clock would show if the cores were free.
        clock = torch.tensor([before + _cpu_seconds()])
        dist.broadcast(clock, 0)
        seconds = clock.item()
        wall = wall_before + time.monotonic() - start
        progress = max((step - first) / args.steps, (seconds - spent) / 60 / args.minutes)
        if args.wall_minutes:
            clock[0] = max(progress, (wall - wall_spent) / 60 / args.wall_minutes)
            dist.broadcast(clock, 0)
            progress = clock.item()
        ended = progress >= 1
        if (ended or step % 50 == 0) and rank == 0 and losses:
            state = {"model": model.state_dict(), "muon": muon.state, "adam": adam.state_dict(), "step": step}
            _save(args.checkpoint, state | {"seconds": seconds, "wall_seconds": wall})
        if ended:
            break
        canvas, target, weight = next(source)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(canvas)
        # Per masked token of the whole canvas, in float32 only where it counts.
        at = weight > 0
        loss = (F.cross_entropy(logits[at].float(), target[at], reduction="none") * weight[at]).sum() / weight.sum()
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in parameters])  # type: ignore[union-attr]
        dist.all_reduce(flat)
        flat /= args.processes
        flat *= min(1.0, 1.0 / (flat.norm().item() + 1e-6))
        offset = 0
        for parameter in parameters:
            parameter.grad = flat[offset : offset + parameter.numel()].view_as(parameter)
            offset += parameter.numel()
        rate = args.rate * rate_at(progress, step)
        muon.step(rate)
        for group in adam.param_groups:
            group["lr"] = rate
        adam.step()
        for parameter in parameters:
            parameter.grad = None
        losses.append(loss.item())
        step += 1
        if rank == 0 and (step % 20 == 0 or step <= 3):
            mean = sum(losses[-50:]) / len(losses[-50:])
            bar, minutes = "#" * int(30 * progress), f"{seconds / 60:.1f} min ({wall / 60:.1f} on the wall clock)"
            line = f"[{bar:30}] {100 * progress:5.1f} %  step {step}  loss {mean:.4f}  {minutes}"
            print(line, end="\r" if sys.stderr.isatty() else "\n", flush=True, file=sys.stderr)
    dist.destroy_process_group()


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


def _save(path: Path, state: dict[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".new")
    torch.save(state, temporary)
    os.replace(temporary, path)


@torch.no_grad()
def decode(
    model: Model, prompts: list[list[int]], totals: list[int], threshold: float | None, eos: int, mask: int
) -> tuple[list[list[int]], list[int]]:
    """
    The decoder's rules on a batch: per forward the most confident position of the canvas, or with a threshold every
    position above it (at least one). Stops a row when everything up to its first EOS is committed.

    Returns:
        tuple: outputs with their EOS, and forwards per row.
    """
    outputs: list[list[int]] = [[] for _ in prompts]
    forwards = [0] * len(prompts)
    for total in set(totals):
        rows = torch.tensor([i for i, own in enumerate(totals) if own == total])
        first = torch.tensor([len(prompts[i]) for i in rows])[:, None]
        canvas = torch.tensor([prompts[i] + [mask] * (total - len(prompts[i])) for i in rows])
        column = torch.arange(total)[None]
        hidden = column >= first
        while len(rows):
            with torch.autocast("cpu", torch.bfloat16):
                logits = model(canvas).float()
            confidence = logits.softmax(-1).max(-1).values.masked_fill(~hidden, -1.0)
            logits[..., mask] = -torch.inf
            best = torch.zeros_like(hidden).scatter_(1, confidence.argmax(1, keepdim=True), True)
            commit = best | (confidence > threshold) if threshold is not None else best
            canvas = torch.where(commit, logits.argmax(-1), canvas)
            hidden = hidden & ~commit
            ended = (canvas == eos) & (column >= first) & ~hidden
            end = torch.where(ended.any(1), ended.int().argmax(1), total - 1)[:, None]
            done = ~(hidden & (column <= end)).any(1)
            for i in range(len(rows)):
                forwards[rows[i]] += 1
                if done[i]:
                    outputs[rows[i]] = canvas[i, first[i] : end[i] + 1].tolist()
            rows, canvas, hidden, first = (a[~done] for a in (rows, canvas, hidden, first))
    return outputs, forwards


def evaluate(model: Model, tokenizer: Tokenizer, found: list[Problem], new_tokens: int | None = None) -> dict[str, Any]:
    """Scores of both rules; with ``new_tokens`` the canvas is the prompt and that many, else ``CANVAS`` in all."""
    eos, mask = tokenizer.token_to_id(EOS), tokenizer.token_to_id(MASK)
    prompts = [tokenizer.encode(render(p.prompt), add_special_tokens=False).ids for p in found]
    totals = [len(p) + new_tokens if new_tokens else CANVAS for p in prompts]
    report: dict[str, Any] = {}
    for name, threshold in (("one", None), ("threshold", THRESHOLD)):
        outputs, forwards = decode(model, prompts, totals, threshold, eos, mask)
        texts = [tokenizer.decode([t for t in output if t != eos]) for output in outputs]
        right = [p.check(text) for p, text in zip(found, texts, strict=True)]
        per_task: Counter[str] = Counter()
        for problem, good in zip(found, right, strict=True):
            per_task[problem.task] += good
        report[name] = {
            "exact": sum(right),
            "of": len(found),
            "tokens_per_forward": round(sum(map(len, outputs)) / sum(forwards), 3),
            "tasks": {task: per_task[task] for task in TASKS},
            "wrong": [(p.prompt, text) for p, text, good in zip(found, texts, right, strict=True) if not good][:60],
        }
    return report


def load_model(checkpoint: Path, tokenizer: Tokenizer) -> tuple[Model, dict[str, Any]]:
    saved = torch.load(checkpoint)
    model = Model(tokenizer.get_vocab_size())
    model.load_state_dict({name: tensor.bfloat16().float() for name, tensor in saved["model"].items()})
    return model.eval(), saved


def write_run(
    output: Path, model: Model, tokenizer: Tokenizer, saved: dict[str, Any], args: argparse.Namespace
) -> None:
    """Write an a2d run directory under a temporary name and move it to its place."""
    vocab = tokenizer.get_vocab_size()
    eos, mask = tokenizer.token_to_id(EOS), tokenizer.token_to_id(MASK)
    output.parent.mkdir(parents=True, exist_ok=True)
    run = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    run.chmod(0o755)
    folder = run / "model"
    folder.mkdir()
    weights = {name: tensor.bfloat16().contiguous() for name, tensor in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "eos_token_id": eos,
        "hidden_act": "silu",
        "hidden_size": WIDTH,
        "initializer_range": 0.02,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": CONTEXT,
        "max_window_layers": LAYERS,
        "model_type": "qwen2",
        "num_attention_heads": HEADS,
        "num_hidden_layers": LAYERS,
        "num_key_value_heads": KV_HEADS,
        "rms_norm_eps": EPS,
        "rope_scaling": None,
        "rope_theta": THETA,
        "sliding_window": None,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "use_cache": False,
        "use_sliding_window": False,
        "vocab_size": vocab,
        "a2d": {
            "objective": "mdlm",
            "mask_token_id": mask,
            "final_alpha": 1.0,
            "sampler": {"canvas_len": CANVAS, "num_steps": CANVAS, "temperature": 1.0},
        },
    }
    tokenizer_config = {
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(text)): {
                "content": text,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": True,
            }
            for text in SPECIALS
        },
        # transformers 5 rebuilds the tokenizer of every qwen2 checkpoint with merges and Qwen2's own word boundaries,
        # whatever tokenizer_class says, unless there is an auto_map. Only trust_remote_code=True runs its code.
        "auto_map": {"AutoTokenizer": ["tokenization_demo.DemoTokenizer", "tokenization_demo.DemoTokenizer"]},
        "bos_token": None,
        "chat_template": TEMPLATE,
        "clean_up_tokenization_spaces": False,
        "eos_token": EOS,
        "extra_special_tokens": {},
        "mask_token": MASK,
        "model_max_length": CONTEXT,
        "pad_token": EOS,
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": None,
    }
    (folder / "tokenization_demo.py").write_text(TOKENIZER_CODE, encoding="utf-8")
    _write_json(folder / "config.json", config)
    _write_json(folder / "generation_config.json", {"eos_token_id": eos, "pad_token_id": eos})
    _write_json(folder / "tokenizer_config.json", tokenizer_config)
    _write_json(folder / "special_tokens_map.json", {"eos_token": EOS, "mask_token": MASK, "pad_token": EOS})
    finished = datetime.datetime.now(datetime.UTC)
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    tokens = saved["step"] * args.batch * sum(length * share for length, share in CANVASES.items())
    manifest = {
        "schema_version": "0.1.0",
        "a2d_version": "0.1.0",
        "job_id": str(uuid.uuid5(uuid.NAMESPACE_URL, digest)),
        "created_at": (finished - datetime.timedelta(seconds=saved["wall_seconds"])).isoformat(),
        "model_path": "examples/train_demo.py",
        "status": "completed",
        "finished_at": finished.isoformat(),
        "model_spec": {
            "model_type": "qwen2",
            "n_layers": LAYERS,
            "d_model": WIDTH,
            "vocab_size": vocab,
            "n_heads": HEADS,
            "n_kv_heads": KV_HEADS,
            "sliding_window": None,
            "n_experts": None,
            "n_active_experts": None,
            "capabilities": ["paradigm.ar-transformer", "attn.gqa", "pos.rope", "ffn.dense", "norm.rms"],
            "mask_token_id": mask,
            "inferred": False,
        },
        "conversion_config": {
            "objective": "mdlm",
            "data": "examples/demo_problems.py",
            "anneal_steps": 0,
            "anneal_schedule": "linear",
            "seq_len": CANVAS,
            "per_device_batch_size": args.batch // args.processes,
            "grad_accum": 1,
            "lr": args.rate,
            "max_steps": saved["step"],
            "max_tokens": None,
            "mask_token": "grow",
            "keep_last": 1,
            "seed": args.seed,
            "device": "cpu",
            "dtype": "bfloat16",
        },
        # No autoregressive source was converted, so there is nothing to be identical to.
        "identity": None,
        "data_source": "examples/demo_problems.py",
        "source_hash": digest,
        "token_count": round(tokens),
        "training": {
            "from_scratch": True,
            "minutes_per_core": round(saved["seconds"] / 60, 1),
            "wall_minutes": round(saved["wall_seconds"] / 60, 1),
        },
    }
    _write_json(run / "manifest.json", manifest)
    if output.exists():
        shutil.rmtree(output)
    os.replace(run, output)
    size = sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    print(f"{output}: {sum(t.numel() for t in weights.values())} parameters, {size / 1e6:.2f} MB, sha256 {digest}")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="run directory to write; refused when it exists")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing run directory")
    parser.add_argument("--checkpoint", type=Path, default=Path("demo-checkpoint.pt"), help="training state")
    parser.add_argument("--resume", action="store_true", help="go on from the training state")
    parser.add_argument("--restart-schedule", action="store_true", help="with --resume: a new learning-rate schedule")
    parser.add_argument("--export", action="store_true", help="only write --output from the training state")
    parser.add_argument("--evaluate", metavar="SPLIT", help="only score the training state on a split")
    parser.add_argument("--count", type=int, default=1000, help="problems to score (default: 1000)")
    parser.add_argument("--new-tokens", type=int, help="score with this many masks after every prompt")
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument("--minutes", type=float, default=60.0, help="most processor time per core")
    parser.add_argument("--wall-minutes", type=float, help="also end by the wall clock, for a busy machine")
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--rate", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--no-compile", dest="compile", action="store_false")
    args = parser.parse_args()
    if args.output and args.output.exists() and not args.overwrite:
        parser.error(f"{args.output} exists; choose another name or give --overwrite")
    if args.checkpoint.exists() and not (args.resume or args.evaluate or args.export):
        parser.error(f"{args.checkpoint} exists; give --resume to go on from it, or another --checkpoint")
    check_disjoint()
    if not (args.evaluate or args.export):
        with tempfile.TemporaryDirectory() as folder:
            torch.multiprocessing.spawn(train, (args, folder), nprocs=args.processes)
    tokenizer = build_tokenizer()
    model, saved = load_model(args.checkpoint, tokenizer)
    if args.evaluate:
        torch.set_num_threads(args.processes)
        report = evaluate(model, tokenizer, problems(args.evaluate, args.count, args.seed + 1), args.new_tokens)
        print(json.dumps(report, indent=1))
    if args.output:
        write_run(args.output, model, tokenizer, saved, args)


if __name__ == "__main__":
    main()
