r"""Train the embedded models, Llamas on the Python standard library: the target, deep and thin, and its draft model.

    python scripts/train_tiny.py --out runs/tiny
    python scripts/train_tiny.py --out runs/tiny-draft --teacher specdec/assets/tiny --layers 2 --width 128 --mlp 384 \
        --heads 2 --kv-heads 1 --tokens 4096 --steps 1600 --lr 3e-3 --muon-lr 4e-3

With a teacher the model has its tokenizer and learns its distribution instead of the text's tokens. The same command
continues an interrupted run: batches are a function of (seed, step), and the checkpoint holds model, optimizers and
step. When the last step is done, the folder ``OUT/export`` holds what ``specdec/assets/tiny`` ships: weights (bf16),
config, tokenizer, model card; ``specdec/assets/tiny-draft`` was made with a teacher.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from drafters.rest.stdlib_corpus import HELD_OUT_ONE_IN, read_files
from specdec.errors import SpecdecError
from specdec.settings.files import replacing
from training.card import command_line
from training.checkpoint import load_checkpoint, save_checkpoint
from training.log import TrainingLog, read_log
from training.loop import LoopConfig, rate_at

BOS, EOS, PAD = "<|begin|>", "<|end|>", "<|pad|>"
VOCABULARY = 4096
RATES = LoopConfig(warmup=0.02, decay=0.45)  # shares of the steps over which the learning rates rise and fall
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}{{ message['content'] + '\\n\\n' }}"
    "{% else %}{{ '# ' + message['role'].capitalize() + ': ' + message['content'].replace('\\n', '\\n# ') + '\\n' }}"
    "{% endif %}{% endfor %}"
)


def train_tokenizer(texts: list[str]) -> Tokenizer:
    """Byte-level BPE: every byte string has an encoding, and decoding gives it back unchanged."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            # Runs of spaces stay whole, so that an indent is one token; digits split one by one.
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[BOS, EOS, PAD],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def encode(tokenizer: Tokenizer, texts: list[str]) -> np.ndarray:
    """One stream of tokens: BOS, file, EOS, BOS, file, ... as uint16."""
    bos, eos = tokenizer.token_to_id(BOS), tokenizer.token_to_id(EOS)
    stream: list[int] = []
    for encoding in tokenizer.encode_batch(texts, add_special_tokens=False):
        stream += [bos, *encoding.ids, eos]
    return np.array(stream, dtype=np.uint16)


def new_model(args: argparse.Namespace) -> LlamaForCausalLM:
    """By default deep and thin: early exits and step costs look like a large model's, at 7 M parameters."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.width,
        intermediate_size=args.mlp,
        num_hidden_layers=args.layers,
        num_attention_heads=args.heads,
        num_key_value_heads=args.kv_heads,
        head_dim=64,
        max_position_embeddings=args.context,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).float()
    with torch.no_grad():  # residual writes start small, so that 2 x layers of them add up to unit scale
        for layer in model.model.layers:
            for weight in (layer.self_attn.o_proj.weight, layer.mlp.down_proj.weight):
                weight.mul_(1 / math.sqrt(2 * args.layers))
    return model


def window_at(step: int, steps: int, context: int) -> int:
    """Length of the training windows: short first, where they are cheap, the whole context in the last steps."""
    for until, length in ((0.5, 256), (0.85, 512), (0.97, 1024)):
        if step < until * steps:
            return min(length, context)
    return context


def batch_at(stream: np.ndarray, step: int, tokens: int, length: int, seed: int) -> torch.Tensor:
    """[tokens // length, length + 1] int64 windows; a function of (seed, step) alone."""
    rng = np.random.default_rng((seed, step))
    starts = rng.integers(0, len(stream) - length - 1, tokens // length)
    return torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))


def loss_of(model: LlamaForCausalLM, batch: torch.Tensor, teacher: LlamaForCausalLM | None = None) -> torch.Tensor:
    """Mean nats per token: against the text, or against the teacher's distribution where there is one."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = model(batch[:, :-1], use_cache=False).logits.flatten(0, 1)
        if teacher is None:
            wanted = batch[:, 1:].flatten()
        else:
            with torch.no_grad():
                wanted = teacher(batch[:, :-1], use_cache=False).logits.flatten(0, 1).float().softmax(-1)
    return F.cross_entropy(logits.float(), wanted)


def optimizers_of(model: LlamaForCausalLM, lr: float, muon_lr: float) -> list[torch.optim.Optimizer]:
    """Muon for the layers' matrices, AdamW for embedding and norms."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    inside = {id(p) for p in matrices}
    rest = [p for p in model.parameters() if id(p) not in inside]
    return [
        torch.optim.Muon(matrices, lr=muon_lr, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=lr, betas=(0.9, 0.95), weight_decay=0.0),
    ]


@torch.no_grad()
def held_out_loss(model, stream: np.ndarray, length: int, windows: int = 64) -> float:
    """Mean nats per token over evenly spaced windows of the held-out stream."""
    starts = np.linspace(0, len(stream) - length - 1, windows).astype(int)
    rows = torch.from_numpy(np.stack([stream[s : s + length + 1] for s in starts]).astype(np.int64))
    return float(np.mean([loss_of(model, part).item() for part in rows.split(16)]))


def export(folder: Path, args: argparse.Namespace, model, tokenizer: Tokenizer, card: str) -> None:
    plain = new_model(args)
    plain.load_state_dict(model.state_dict())
    with replacing(folder) as beside:
        plain.to(torch.bfloat16).save_pretrained(beside)
        config = json.loads((beside / "config.json").read_text())
        config["dtype"] = "float32"  # stored in bf16 for size; decoding in float32 is the default
        (beside / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        # A prompt begins where a file does in training.
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, bos_token=BOS, eos_token=EOS, pad_token=PAD, clean_up_tokenization_spaces=False
        )
        fast.chat_template = CHAT_TEMPLATE
        fast.save_pretrained(beside)
        (beside / "README.md").write_text(card)


def model_card(args, model, sizes: dict[str, int], losses: list[tuple[int, float]], bytes_per_token: float) -> str:
    parameters = sum(p.numel() for p in model.parameters())
    config, last = model.config, losses[-1][1]
    title = "The embedded model" if args.teacher is None else "The embedded model's draft model"
    purpose = (
        "It exists to test and show speculative decoding without a download; it writes Python-like text and knows "
        "nothing."
        if args.teacher is None
        else "It writes ahead for the embedded model, whose distribution it learned and whose tokenizer it has."
    )
    return f"""# {title}

A decoder of the Llama architecture: {config.num_hidden_layers} layers of width {config.hidden_size}, \
{config.num_attention_heads} query heads on {config.num_key_value_heads} key/value heads, \
{parameters / 1e6:.2f} M parameters (embedding tied), byte-level BPE of {VOCABULARY} tokens, context \
{config.max_position_embeddings}. {purpose}

- Data: the sources of CPython {sys.version.split()[0]}'s standard library, tests included, {sizes["train_files"]} \
files, {sizes["train_tokens"]:,} tokens. One file in {HELD_OUT_ONE_IN}, by a hash of its path, is held out: \
{sizes["held_out_files"]} files, {sizes["held_out_tokens"]:,} tokens.
- Licence: the data is under the PSF License Version 2; the weights are under this project's Apache-2.0.
- Training: `python scripts/{command_line()}`, {args.steps} steps of {args.tokens} tokens, \
{args.steps * args.tokens / 1e6:.0f} M tokens; windows of 256 tokens, then 512, 1,024 and, in the last 3%, \
{config.max_position_embeddings:,}; Muon for matrices, AdamW for the rest; bf16 autocast on a CPU.
- Held-out loss: {last:.3f} nats per token ({last / math.log(2) / bytes_per_token:.3f} bits per byte).

| step | held-out loss |
|---:|---:|
""" + "".join(f"| {step} | {loss:.3f} |\n" for step, loss in losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=Path("runs/tiny"))
    parser.add_argument("--steps", type=int, default=2250)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per step")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=192)
    parser.add_argument("--mlp", type=int, default=512, help="inner width of the MLPs")
    parser.add_argument("--heads", type=int, default=4, help="query heads of 64")
    parser.add_argument("--kv-heads", type=int, default=2)
    parser.add_argument("--teacher", type=Path, help="folder of a model to learn from, whose tokenizer is taken")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--lr", type=float, default=4e-3, help="AdamW: embedding and norms")
    parser.add_argument("--muon-lr", type=float, default=1e-2, help="Muon: the layers' matrices")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--eval-every", type=int, default=250)
    parser.add_argument("--save-every", type=int, default=100)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--no-compile", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.out.mkdir(parents=True, exist_ok=True)

    train_texts = [text for _, text in read_files(held_out=False)]
    held_texts = [text for _, text in read_files(held_out=True)]
    tokenizer_file = (args.teacher or args.out) / "tokenizer.json"
    if not tokenizer_file.exists():
        train_tokenizer(train_texts).save(str(tokenizer_file))
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    train, held = encode(tokenizer, train_texts), encode(tokenizer, held_texts)
    bytes_per_token = sum(len(t.encode()) for t in held_texts) / len(held)
    sizes = {"train_files": len(train_texts), "held_out_files": len(held_texts)}
    sizes |= {"train_tokens": len(train), "held_out_tokens": len(held)}
    digest = hashlib.sha256(train.tobytes()).hexdigest()[:12]
    print(f"{sizes} | {bytes_per_token:.2f} bytes per token | corpus {digest}")

    torch.manual_seed(args.seed)
    model = new_model(args)
    teacher = None
    if args.teacher is not None:
        teacher = LlamaForCausalLM.from_pretrained(args.teacher, dtype=torch.float32).eval().requires_grad_(False)
    optimizers = optimizers_of(model, args.lr, args.muon_lr)
    checkpoint, step = args.out / "checkpoint.safetensors", 0
    same = {"steps": args.steps, "tokens": args.tokens, "seed": args.seed, "data": digest}
    if checkpoint.exists():  # of all but the head, which is the embedding
        step = load_checkpoint(checkpoint, model.model, optimizers, run=same)["step"]
    log = TrainingLog(args.out, step)
    compiled = loss_of if args.no_compile else torch.compile(loss_of, dynamic=False)
    bar = tqdm(total=args.steps, initial=step, unit="step", mininterval=10)
    began, running = time.time(), []
    while step < args.steps:
        length = window_at(step, args.steps, args.context)
        for optimizer, base in zip(optimizers, (args.lr, args.muon_lr), strict=True):
            optimizer.param_groups[0]["lr"] = base * rate_at(step, args.steps, RATES)
        loss = compiled(model, batch_at(train, step, args.tokens, length, args.seed), teacher)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if not torch.isfinite(norm):
            raise SystemExit(
                f"step {step}: gradient norm is {norm}; lower --lr or --muon-lr and start the command again"
            )
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        step += 1
        running.append(loss.item())
        bar.update()
        if step % args.save_every == 0 or step == args.steps:
            save_checkpoint(checkpoint, model.model, optimizers, state={"step": step}, run=same)
        if step % args.eval_every == 0 or step == args.steps:
            entry = {"loss": float(np.mean(running)), "held_out": held_out_loss(model, held, 1024)}
            running.clear()
            log.write(step=step, **entry, seconds=time.time() - began)
            bar.write(f"step {step}: {entry}")
    bar.close()
    log.close()
    losses = [(line["step"], line["held_out"]) for line in read_log(log.path)]
    export(args.out / "export", args, model, tokenizer, model_card(args, model, sizes, losses, bytes_per_token))
    print(f"exported to {args.out / 'export'}; held-out loss {losses[-1][1]:.3f}")


if __name__ == "__main__":
    try:
        main()
    except SpecdecError as error:
        raise SystemExit(f"error: {error}") from error
