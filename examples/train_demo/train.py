"""Train the demo model on one CPU thread: ``python train.py --corpus FOLDER --out FOLDER --minutes 110``.

Stops cleanly on SIGTERM or Ctrl-C and goes on from its checkpoint when started again. The learning rate and
the curriculum follow the minutes spent training, so that the run ends on time on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from data import WINDOW, encode_documents, novel_stream, read_corpus, story_stream, train_tokenizer
from model import DemoModel, ModelConfig
from optimizer import Muon
from tokenizers import Tokenizer

# A gate rate of 0.003 collapses the routing: inputs have norm 16, so one step may move a logit by 0.6.
ADAM_RATES = {"embed_tokens": 0.01, "lm_head": 0.003, "gate_weight": 0.0005, "norm": 0.002}
BIAS_RATE = 0.01  # DeepSeek-V3's 0.001 is for far more steps; follows the learning rate down to zero
DECAY_START = 0.45  # share of the run at which the learning rate begins its way down
EXPERT_PERIOD = (
    2  # steps whose gradients the experts gather: each sees a quarter of the tokens, and Muon is dear
)
MAX_STORY_SHARE = 0.7  # so that the novels stay alive
CHAT_SHARES = [0.1, 0.3]  # of the stories in the first pass, and in the later ones


def learning_rate_factor(progress: float) -> float:
    """Warm up over 2 % of the run, hold, then go down linearly to zero."""
    if progress < 0.02:
        return 0.1 + 0.9 * progress / 0.02
    return min(1.0, max(0.0, (1 - progress) / (1 - DECAY_START)))


def story_share(progress: float) -> float:
    """Share of story windows: novels first, then stories with some novels kept."""
    return min(MAX_STORY_SHARE, 0.15 + 0.65 * max(0.0, progress - 0.15) / 0.45)


def capped_story_share(progress: float, windows_per_progress: float, windows_left: float) -> float:
    """Scale ``story_share`` so that the rest of the run uses up the stories' allowance and no more."""
    rest = np.linspace(progress, 1.0, 50)
    planned = windows_per_progress * (1 - progress) * np.mean([story_share(p) for p in rest])
    return min(MAX_STORY_SHARE, story_share(progress) * max(0.0, windows_left) / max(planned, 1.0))


def row_length(progress: float, step: int) -> int:
    """Tokens per training row: 256, then 512, with 1024 now and then."""
    if step % 8 == 7:
        return WINDOW
    return 256 if progress < 0.45 else 512


def make_optimizers(model: DemoModel, muon_rate: float) -> list[torch.optim.Optimizer]:
    """Return AdamW for embedding, head, gate and norms, Muon for the inner matrices, Muon for the experts."""
    adam_groups: dict[str, list] = {name: [] for name in ADAM_RATES}
    matrices, experts = [], []
    expert_ids = {id(stack) for layer in model.moe_layers for stack in (layer.gate_up, layer.down)}
    for name, parameter in model.named_parameters():
        kind = next((kind for kind in ADAM_RATES if kind in name), None)
        if kind:
            adam_groups[kind].append(parameter)
        else:
            (experts if id(parameter) in expert_ids else matrices).append(parameter)
    adam = torch.optim.AdamW(
        [{"params": adam_groups[kind], "lr": rate} for kind, rate in ADAM_RATES.items()],
        betas=(0.9, 0.95),
        weight_decay=0.0,
    )
    optimizers = [adam, Muon(matrices, lr=muon_rate), Muon(experts, lr=muon_rate)]
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers


@torch.no_grad()
def held_out_loss(model: DemoModel, tokens: np.ndarray, num_rows: int = 48, length: int = 512) -> float:
    """Return the mean loss in nats per token over rows spread evenly through the held-out tokens."""
    starts = np.linspace(0, len(tokens) - length - 2, num_rows).astype(int)
    total = 0.0
    for start in starts:
        row = torch.from_numpy(tokens[start : start + length + 1].astype(np.int64))[None]
        total += F.cross_entropy(model(row[:, :-1])[0], row[0, 1:]).item()
    for layer in model.moe_layers:
        layer.load.zero_()
    return total / num_rows


def save_atomically(value: object, path: Path) -> None:
    """Write beside the target, then rename: a killed run never leaves half a checkpoint."""
    partial = path.with_suffix(".partial")
    torch.save(value, partial)
    os.replace(partial, path)


def plot_losses(log_path: Path, picture_path: Path) -> None:
    """Draw the loss curve; without matplotlib, do nothing."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return
    rows = [json.loads(line) for line in log_path.read_text().splitlines()]
    figure, axes = pyplot.subplots(figsize=(7, 4))
    for domain, colour in (("novels", "tab:blue"), ("stories", "tab:orange")):
        train = [(r["tokens"] / 1e6, r[f"loss_{domain}"]) for r in rows if r.get(f"loss_{domain}")]
        held = [(r["tokens"] / 1e6, r[f"held_out_{domain}"]) for r in rows if f"held_out_{domain}" in r]
        if train:
            axes.plot(
                *zip(*train, strict=False),
                color=colour,
                alpha=0.35,
                linewidth=0.8,
                label=f"{domain}, training",
            )
        if held:
            axes.plot(
                *zip(*held, strict=False), color=colour, marker="o", markersize=3, label=f"{domain}, held out"
            )
    axes.set(xlabel="million tokens seen", ylabel="loss, nats per token")
    if axes.lines:
        axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(picture_path, dpi=110)
    pyplot.close(figure)


class Trainer:
    """The run: model, optimisers, data streams, clock and log."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.out = args, Path(args.out)
        self.out.mkdir(parents=True, exist_ok=True)
        corpus = read_corpus(Path(args.corpus))
        config = ModelConfig()
        tokenizer_path = self.out / "tokenizer.json"
        if not tokenizer_path.exists():
            train_tokenizer(corpus, config.vocab_size).save(str(tokenizer_path))
        tokenizer = Tokenizer.from_file(str(tokenizer_path))
        self.held_out = {
            "novels": encode_documents(tokenizer, corpus.held_out_novels),
            "stories": encode_documents(tokenizer, corpus.held_out_stories),
        }
        torch.manual_seed(args.seed)
        self.model = DemoModel(config)
        self.optimizers = make_optimizers(self.model, args.muon_rate)
        self.step, self.tokens, self.spent_s = 0, 0, 0.0
        self.generator = np.random.default_rng(args.seed)
        states: dict[str, dict[str, int]] = {"novels": {}, "stories": {}}
        self.checkpoint_path = self.out / "checkpoint.pt"
        if self.checkpoint_path.exists():
            states = self._load_checkpoint()
        novel_tokens_path = self.out / "novels.npy"
        if not novel_tokens_path.exists():
            np.save(novel_tokens_path, encode_documents(tokenizer, corpus.novels))
        self.novels = novel_stream(np.load(novel_tokens_path), args.seed, **states["novels"])
        self.stories = story_stream(tokenizer, corpus.stories, CHAT_SHARES, args.seed, **states["stories"])
        self.is_stopping = False

    def _load_checkpoint(self) -> dict[str, dict[str, int]]:
        saved = torch.load(self.checkpoint_path, weights_only=True)
        self.model.load_state_dict(saved["model"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=False):
            peaks = [
                group["peak_lr"] for group in optimizer.param_groups
            ]  # from the flags, not the checkpoint
            optimizer.load_state_dict(state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=False):
                group["peak_lr"] = peak
        self.step, self.tokens, self.spent_s = saved["step"], saved["tokens"], saved["spent_s"]
        self.generator = np.random.default_rng((self.args.seed, self.step))
        print(f"resumed at step {self.step}, {self.tokens:,} tokens, {self.spent_s / 60:.1f} min", flush=True)
        return saved["streams"]

    def save(self) -> None:
        """Write the checkpoint and the loss curve."""
        checkpoint = {
            "config": asdict(self.model.config),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "step": self.step,
            "tokens": self.tokens,
            "spent_s": self.spent_s,
            "streams": {"novels": self.novels.state(), "stories": self.stories.state()},
        }
        save_atomically(checkpoint, self.checkpoint_path)
        plot_losses(self.out / "log.jsonl", self.out / "loss.png")

    def next_batch(self, progress: float) -> tuple[np.ndarray, list[str]]:
        """Return windows [batch, WINDOW + 1] and the domain of each."""
        allowance = self.args.story_passes * len(self.stories.starts)
        windows_left = allowance - self.stories.passes * len(self.stories.starts)
        windows_per_progress = max(self.tokens / WINDOW, 1.0) / max(progress, 1e-3)
        share = capped_story_share(progress, windows_per_progress, windows_left)
        domains = np.where(
            self.generator.random(self.args.batch_windows) < share, "stories", "novels"
        ).tolist()
        streams = {"novels": self.novels, "stories": self.stories}
        return np.stack([streams[domain].take() for domain in domains]), domains

    def train_step(self, progress: float) -> dict:
        """Run one optimiser step over a batch of windows, two windows at a time; return what to log."""
        factor = learning_rate_factor(progress)
        windows, domains = self.next_batch(progress)
        length = row_length(progress, self.step)
        losses: dict[str, list[float]] = {"novels": [], "stories": []}
        for pair, names in zip(
            np.split(windows, len(windows) // 2), np.split(np.array(domains), len(windows) // 2), strict=False
        ):
            ids_BS = torch.from_numpy(pair[:, :-1].reshape(-1, length))
            targets = torch.from_numpy(pair[:, 1:].reshape(-1))
            loss_T = F.cross_entropy(self.model(ids_BS).flatten(0, 1), targets, reduction="none")
            (loss_T.mean() * len(pair) / len(windows)).backward()
            for name, loss in zip(names, loss_T.detach().view(len(pair), -1).mean(1).tolist(), strict=False):
                losses[name].append(loss)
        is_expert_step = self.step % EXPERT_PERIOD == EXPERT_PERIOD - 1
        for optimizer in self.optimizers if is_expert_step else self.optimizers[:-1]:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        hottest = [layer.balance(BIAS_RATE * factor) for layer in self.model.moe_layers]
        self.step += 1
        self.tokens += windows.shape[0] * WINDOW
        return {
            **{f"loss_{domain}": float(np.mean(values)) for domain, values in losses.items() if values},
            "hottest_over_mean": max(hottest),
            "lr_factor": factor,
        }

    def run(self) -> None:
        """Train until the minutes are spent or a signal asks to stop."""
        for signal_id in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signal_id, lambda *_: setattr(self, "is_stopping", True))
        total_s = self.args.minutes * 60
        saved_at = evaluated_at = self.spent_s
        recent: list[dict] = []
        with (self.out / "log.jsonl").open("a", buffering=1) as log:
            while self.spent_s < total_s and not self.is_stopping:
                started = time.monotonic()
                recent.append(self.train_step(self.spent_s / total_s))
                is_last = self.spent_s + time.monotonic() - started >= total_s
                if self.step % 20 == 0:
                    row = {"step": self.step, "tokens": self.tokens, "minutes": round(self.spent_s / 60, 2)}
                    for key in ("loss_novels", "loss_stories", "hottest_over_mean", "lr_factor"):
                        values = [r[key] for r in recent if key in r]
                        row[key] = round(float(np.mean(values)), 4) if values else None
                    row["story_passes"] = round(self.stories.passes, 3)
                    recent = []
                    log.write(json.dumps(row) + "\n")
                    print(row, flush=True)
                if self.spent_s - evaluated_at > 600 or is_last:
                    evaluated_at = self.spent_s
                    row = {"step": self.step, "tokens": self.tokens, "minutes": round(self.spent_s / 60, 2)}
                    row |= {
                        f"held_out_{name}": held_out_loss(self.model, t) for name, t in self.held_out.items()
                    }
                    log.write(json.dumps(row) + "\n")
                    print(row, flush=True)
                self.spent_s += time.monotonic() - started
                if self.spent_s - saved_at > self.args.save_minutes * 60:
                    saved_at = self.spent_s
                    self.save()
        self.save()


def main() -> None:
    """Read the flags and train."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--corpus", required=True, help="folder with the two .txt.xz files")
    parser.add_argument("--out", required=True, help="folder for tokenizer, checkpoint, log and loss curve")
    parser.add_argument("--minutes", type=float, default=110.0, help="training time, all starts together")
    parser.add_argument("--save-minutes", type=float, default=5.0)
    parser.add_argument("--batch-windows", type=int, default=2, help="windows of 1024 tokens per step; even")
    parser.add_argument(
        "--story-passes", type=float, default=2.6, help="see each story at most about this often"
    )
    parser.add_argument("--muon-rate", type=float, default=0.008, help="peak learning rate of the matrices")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    Trainer(args).run()


if __name__ == "__main__":
    main()
