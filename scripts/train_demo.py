"""Train the bundled demo model, a small byte-level GPT-2, with the plain PyTorch twin.

The last tenth of the text is held out. The averaged weights that do best on it are saved.
"""

import copy
import math
import time
from argparse import ArgumentDefaultsHelpFormatter, ArgumentParser, Namespace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR
from tqdm import tqdm

from minifused import checkpoint
from minifused.config import GPTConfig
from minifused.errors import UserError, run_cli
from minifused.twin import Twin

DEMO_FOLDER = Path(__file__).resolve().parents[1] / "minifused" / "assets" / "demo"
HEAD_DIM, WARMUP_STEPS, READ_LOSS_EVERY, EMA_DECAY = 64, 200, 50, 0.998


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__, formatter_class=ArgumentDefaultsHelpFormatter)
    p.add_argument("--text", type=Path, required=True, help="the text to learn, any bytes")
    p.add_argument("--out", type=Path, default=DEMO_FOLDER, help="folder the model is saved in")
    p.add_argument("--steps", type=int, default=9000, help="optimizer steps")
    p.add_argument("--batch-size", type=int, default=64, help="windows of text in a step")
    p.add_argument("--learning-rate", type=float, default=2e-3, help="peak of the schedule")
    p.add_argument("--weight-decay", type=float, default=0.1, help="of matrices, not vectors")
    p.add_argument("--dropout", type=float, default=0.15, help="probability, in all places")
    p.add_argument("--n-layer", type=int, default=6, help="transformer layers")
    p.add_argument("--n-embd", type=int, default=192, help=f"width, a multiple of {HEAD_DIM}")
    p.add_argument("--n-positions", type=int, default=256, help="context length in bytes")
    p.add_argument("--seed", type=int, default=1337, help="of weights, batches and dropout")
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    p.add_argument("--eval-every", type=int, default=500, help="steps between validations")
    return p.parse_args(argv)


def make_config(args: Namespace) -> GPTConfig:
    """Check the flags and return the shape of the model."""
    counts = {"steps": 1, "batch_size": 1, "eval_every": 1, "n_positions": 2}
    for name, least in {**counts, "learning_rate": 0, "weight_decay": 0}.items():
        if not getattr(args, name) >= least:
            raise UserError(f"--{name.replace('_', '-')} must be at least {least}; give more")
    if args.n_embd < HEAD_DIM or args.n_embd % HEAD_DIM:
        raise UserError(f"--n-embd is {args.n_embd}; give a multiple of the head size {HEAD_DIM}")
    sizes = {name: getattr(args, name) for name in ("n_positions", "n_layer", "n_embd")}
    dropout = dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), args.dropout)
    return GPTConfig(vocab_size=256, n_head=args.n_embd // HEAD_DIM, **sizes, **dropout)


def load_split(path: Path, n_positions: int) -> tuple[Tensor, Tensor]:
    """The first nine tenths of a file's bytes and the rest, as uint8 tensors."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"--text {path}: {error.strerror}; give a readable file") from error
    if len(data) < (least := 10 * (n_positions + 1)):
        raise UserError(f"--text {path}: {len(data):,} bytes; give a text of at least {least:,}")
    cut = len(data) * 9 // 10
    tokens = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tokens[:cut], tokens[cut:]


def sample(data: Tensor, args: Namespace, generator: torch.Generator) -> Tensor:
    """Random windows of the data, (batch_size, n_positions + 1), int64, made on its device."""
    shape, last = (args.batch_size, 1), len(data) - args.n_positions
    starts = torch.randint(last, shape, generator=generator, device=data.device)
    return data[starts + torch.arange(args.n_positions + 1, device=data.device)].long()


def loss_of(model: Twin, windows: Tensor, reduction: str = "mean") -> Tensor:
    """Cross entropy in nats of all bytes of the windows, (B, T), but the first of each."""
    logits = model(windows[:, :-1])  # (B, T - 1, 256)
    return F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten(), reduction=reduction)


def validate(average: Twin, data: Tensor) -> float:
    """Nats per byte over all data, in windows of the context length, of the weights as shipped."""
    shipped, size = copy.deepcopy(average).half().float().eval(), average.config.n_positions
    whole = len(data) - len(data) % size
    parts = [*data[:whole].view(-1, size).split(64), data[None, whole:]]  # (up to 64, size) each
    sums = [loss_of(shipped, part.long(), "sum").item() for part in parts if part.shape[1] > 1]
    return sum(sums) / (len(data) - math.ceil(len(data) / size))


def make_optimizer(model: Twin, args: Namespace) -> tuple[AdamW, LRScheduler]:
    """AdamW, decaying matrices only, and its schedule: linear warm-up, cosine to a twentieth."""
    groups: list[dict] = [{"params": [p for p in model.parameters() if p.ndim > 1]}]
    groups += [{"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0}]
    peak, decay = args.learning_rate, args.weight_decay
    adam = AdamW(groups, peak, betas=(0.9, 0.99), weight_decay=decay, fused=True)
    warmup = min(WARMUP_STEPS, args.steps // 10 + 1)
    rise = LinearLR(adam, 1 / warmup, total_iters=warmup)
    fall = CosineAnnealingLR(adam, max(1, args.steps - warmup), peak / 20)
    return adam, SequentialLR(adam, [rise, fall], [warmup])


def train(model: Twin, args: Namespace, data: Tensor, valid_data: Tensor) -> tuple[dict, float]:
    """Train `model`; return the state of its average at its best, and the validation loss then."""
    average, best, best_loss = copy.deepcopy(model).requires_grad_(False), {}, math.inf
    optimizer, scheduler = make_optimizer(model, args)
    generator = torch.Generator(data.device).manual_seed(args.seed)
    for step in (bar := tqdm(range(1, args.steps + 1), unit="step")):
        with torch.autocast(data.device.type, torch.bfloat16, enabled=data.is_cuda):
            loss = loss_of(model, sample(data, args, generator))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        for mean, parameter in zip(average.parameters(), model.parameters(), strict=True):
            mean.lerp_(parameter.detach(), 1 - min(EMA_DECAY, step / (step + 9)))
        if step % READ_LOSS_EVERY == 0:  # reading makes the host wait for the device
            bar.set_postfix(train=loss.item(), best_valid=best_loss)
        due = step % args.eval_every == 0 or step == args.steps
        if due and (valid_loss := validate(average, valid_data)) < best_loss:
            best, best_loss = copy.deepcopy(average.state_dict()), valid_loss
    if not best:
        raise UserError("the training diverged; lower --learning-rate")
    return best, best_loss


def main(argv: list[str] | None = None) -> None:
    """Train on the text given and save the model; one line on stdout says how it went."""
    args = parse_args(argv)
    config = make_config(args)
    splits = load_split(args.text, config.n_positions)
    if args.device == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda: PyTorch sees no GPU; use --device cpu")
    device = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    torch.manual_seed(args.seed)
    model, start = Twin(config).to(device), time.perf_counter()
    best, loss = train(model, args, *(split.to(device) for split in splits))
    seconds, count = time.perf_counter() - start, sum(p.numel() for p in model.parameters())
    checkpoint.save(args.out, config, best, torch.float16)
    size = f"{count:,} parameters, {args.steps} steps, {seconds:.1f} s"
    print(f"validation loss {loss:.4f} nats per byte, {size}")


if __name__ == "__main__":
    run_cli(main)
