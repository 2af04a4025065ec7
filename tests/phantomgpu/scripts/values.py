"""Five losses whose sizes or branches hang on values: masks, hard examples, boxes, PPO, PSNR."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.nn import functional

SIZE = int(sys.argv[1])
DEVICE = "cuda"


def masked_language(model: nn.Module) -> Tensor:
    """BERT's masks: 15 percent of tokens are targets, of which 80 percent become the mask."""
    tokens = torch.randint(5, 1000, (SIZE, 512), device=DEVICE)
    chosen = torch.bernoulli(torch.full(tokens.shape, 0.15, device=DEVICE)).bool()
    hidden = torch.bernoulli(torch.full(tokens.shape, 0.8, device=DEVICE)).bool() & chosen
    labels = tokens.masked_fill(~chosen, -100)
    number = len(tokens[chosen])
    assert 0.14 < number / tokens.numel() < 0.16, number
    assert 0.11 < hidden.sum().item() / tokens.numel() < 0.13
    rows = model(functional.one_hot(tokens.masked_fill(hidden, 4)[chosen] % 64, 64).float())
    return functional.cross_entropy(rows, labels[chosen] % 64)


def hard_examples(model: nn.Module) -> Tensor:
    """OHEM: only the hardest samples count, at least a quarter of them."""
    rows = torch.randn(SIZE * 256, 64, device=DEVICE)
    losses = functional.cross_entropy(model(rows), rows.argmax(1), reduction="none")
    losses, _ = losses.sort(descending=True)
    least = len(losses) // 4
    hard = losses[losses > 0.7] if losses[least] > 0.7 else losses[:least]
    return hard.mean()


def boxes(model: nn.Module) -> Tensor:
    """A detector's last step: greedy suppression of boxes, then a loss of those that stay."""
    rows = torch.randn(300, 64, device=DEVICE)
    scores, corners = model(rows).max(1).values, rows[:, :2]
    order, kept = scores.argsort(descending=True), []
    while len(order):
        kept.append(order[0])
        sides = (1 - (corners[order] - corners[order[0]]).abs()).clamp(min=0)
        shared = sides.prod(1)
        order = order[shared / (2 - shared) < 0.3]
    assert 1 < len(kept) <= 300
    stay = model(rows[torch.stack(kept)])
    return functional.mse_loss(stay, torch.zeros_like(stay))


def policy(model: nn.Module) -> Tensor:
    """PPO: clipped ratios over shuffled minibatches, which end early if the policy moved far."""
    states = torch.randn(SIZE * 64, 64, device=DEVICE)
    actions = torch.distributions.Categorical(logits=model(states)).sample()
    before = functional.log_softmax(model(states), 1).gather(1, actions[:, None]).detach()
    advantages = torch.randn(SIZE * 64, 1, device=DEVICE)
    advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
    total = torch.zeros((), device=DEVICE)
    for part in torch.randperm(SIZE * 64, device=DEVICE).split(SIZE * 16):
        now = functional.log_softmax(model(states[part]), 1).gather(1, actions[part][:, None])
        ratio = (now - before[part]).exp()
        clipped = ratio.clamp(0.8, 1.2) * advantages[part]
        total = total - torch.min(ratio * advantages[part], clipped).mean()
        if (before[part] - now).mean().item() > 0.015:
            break
    return total


def noise_ratio(model: nn.Module) -> Tensor:
    """PSNR, whose logarithm is of one over the mean squared error."""
    rows = torch.randn(SIZE * 64, 64, device=DEVICE)
    error = functional.mse_loss(model(rows), rows)
    ratio = 10 * torch.log10(1 / error.detach()).item()
    return error if ratio < 40 else error * 0


def main() -> None:
    """Train a small model on all of them."""
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(4):
        for loss in (masked_language, hard_examples, boxes, policy, noise_ratio):
            loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()


main()
