"""Losses that are means over the samples of a batch, and losses that are not, by name.

Each is a function of a batch `(x, y, t, m)`: 6 features, one of 3 classes, 3 targets, a mask of 5
places. `rest` holds what is drawn once and is the same for all batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as fn

Loss = Callable[[Any], Tensor]
torch.manual_seed(0)
DIM, CLASSES, PLACES = 6, 3, 5


def double(module: nn.Module) -> nn.Module:
    return module.double()


net: Any = double(nn.Linear(DIM, CLASSES))
deep: Any = double(
    nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.LayerNorm(7), nn.Linear(7, CLASSES))
)
enc: Any = double(nn.Linear(DIM, 8))
enc2: Any = double(nn.Linear(DIM, 8))
emb: Any = double(nn.Embedding(11, 8))
pos: Any = double(nn.Embedding(PLACES, 8))
block: Any = double(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True))
block_time_first: Any = double(nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0))
lstm: Any = double(nn.LSTM(8, 7, batch_first=True))
conv: Any = double(
    nn.Sequential(nn.Conv1d(1, 4, 3), nn.ReLU(), nn.AdaptiveAvgPool1d(1), nn.Flatten())
)
head: Any = double(nn.Linear(4, CLASSES))
per_token: Any = double(nn.Linear(8, 11))
log_sigma: Any = nn.Parameter(torch.zeros(2).double())
temperature: Any = nn.Parameter(torch.tensor(0.5).double())
centers: Any = nn.Parameter(torch.randn(CLASSES, 8).double())
teacher: Any = double(nn.Linear(DIM, CLASSES)).requires_grad_(False)
prototypes = torch.randn(7, 8).double()
pos_weight = torch.tensor([1.0, 2.0, 3.0]).double()
codebook: Any = double(nn.Embedding(9, 8))


def batch_of(num: int, seed: int = 0) -> Any:
    random = torch.Generator().manual_seed(seed)
    x = torch.randn(num, DIM, generator=random).double()
    y = torch.randint(0, CLASSES, (num,), generator=random)
    t = torch.randn(num, CLASSES, generator=random).double()
    m = torch.rand(num, PLACES, generator=random) < 0.6
    m[:, 0] = True
    return x, y, t, m


def ids(batch: Any) -> Tensor:
    """Tokens of each sample: a function of its features alone."""
    return (batch[0][:, :PLACES].abs() * 7).long() % 11


def labels(batch: Any) -> Tensor:
    return ids(batch).masked_fill(~batch[3], -100)


def tokens(batch: Any) -> Tensor:
    return emb(ids(batch)) + pos(torch.arange(PLACES))


def logits(batch: Any) -> Tensor:
    return per_token(block(tokens(batch)))


def focal(batch: Any) -> Tensor:
    each = fn.cross_entropy(net(batch[0]), batch[1], reduction="none")
    return ((1 - (-each).exp()) ** 2 * each).mean()


def dice(batch: Any) -> Tensor:
    p, q = deep(batch[0]).sigmoid(), (batch[2] > 0).double()
    return (1 - (2 * (p * q).sum(1) + 1) / (p.sum(1) + q.sum(1) + 1)).mean()


def batch_dice(batch: Any) -> Tensor:
    p, q = deep(batch[0]).sigmoid(), (batch[2] > 0).double()
    return 1 - (2 * (p * q).sum() + 1) / (p.sum() + q.sum() + 1)


def gradient_penalty(batch: Any) -> Tensor:
    x = batch[0].clone().requires_grad_()
    (slope,) = torch.autograd.grad(deep(x).sum(), x, create_graph=True)
    return deep(batch[0]).mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()


def r_drop(batch: Any) -> Tensor:
    one, two = net(batch[0]), deep(batch[0])
    p, q = fn.log_softmax(one, -1), fn.log_softmax(two, -1)
    kl = fn.kl_div(p, q, reduction="none", log_target=True).sum(-1)
    kl = kl + fn.kl_div(q, p, reduction="none", log_target=True).sum(-1)
    return fn.cross_entropy(one, batch[1]) + fn.cross_entropy(two, batch[1]) + 0.5 * kl.mean() / 2


def mixup(batch: Any) -> Tensor:
    lam, other = 0.3, (batch[1] + 1) % CLASSES
    out = deep(batch[0])
    return lam * fn.cross_entropy(out, batch[1]) + (1 - lam) * fn.cross_entropy(out, other)


def dpo(batch: Any) -> Tensor:
    ratio = fn.log_softmax(net(batch[0]), -1) - fn.log_softmax(teacher(batch[0]), -1)
    chosen = ratio.gather(1, batch[1][:, None]).squeeze(1)
    rejected = ratio.gather(1, ((batch[1] + 1) % CLASSES)[:, None]).squeeze(1)
    return -fn.logsigmoid(0.1 * (chosen - rejected)).mean()


def vq(batch: Any) -> Tensor:
    z = enc(batch[0])
    nearest = torch.cdist(z, codebook.weight).argmin(1)
    quantized = codebook(nearest)
    return fn.mse_loss(quantized, z.detach()) + 0.25 * fn.mse_loss(z, quantized.detach())


def sequence_mean(batch: Any) -> Tensor:
    each = fn.cross_entropy(logits(batch).mT, labels(batch), reduction="none")
    return (each.sum(1) / batch[3].sum(1)).mean()


def ctc(batch: Any) -> Tensor:
    scores = fn.log_softmax(per_token(tokens(batch)), -1).transpose(0, 1)
    num = len(batch[0])
    targets = 1 + ids(batch)[:, :2] % 10
    sizes = torch.full((num,), PLACES), torch.full((num,), 2)
    return fn.ctc_loss(scores, targets, *sizes, zero_infinity=True)


def triplet(batch: Any) -> Tensor:
    return nn.TripletMarginLoss()(enc(batch[0]), enc(batch[0] + 0.1), enc(batch[0].flip(1)))


def per_row(batch: Any) -> Tensor:
    pairs = zip(batch[0], batch[2], strict=True)
    found: Any = sum(fn.mse_loss(net(x), t) for x, t in pairs) / len(batch[0])
    return found


def unbound(batch: Any) -> Tensor:
    return torch.stack([row.square().sum() for row in net(batch[0])]).mean()


def two_views(batch: Any) -> Tensor:
    one, two = enc(torch.cat([batch[0], batch[0] + 0.1])).chunk(2)
    return fn.cosine_similarity(one, two, dim=1).mean()


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def custom_function(batch: Any) -> Tensor:
    apply: Any = Scale.apply
    return fn.cross_entropy(apply(net(batch[0])), batch[1])


def actor_critic(batch: Any) -> Tensor:
    out = deep(batch[0])
    dist = torch.distributions.Categorical(logits=out)
    value = net(batch[0])[:, 0]
    advantage = (batch[2][:, 0] - value).detach()
    policy = -(dist.log_prob(batch[1]) * advantage).mean()
    return policy + 0.5 * (batch[2][:, 0] - value).square().mean() - 0.01 * dist.entropy().mean()


def ppo(batch: Any) -> Tensor:
    now = torch.distributions.Categorical(logits=deep(batch[0])).log_prob(batch[1])
    old = torch.distributions.Categorical(logits=teacher(batch[0])).log_prob(batch[1])
    ratio, advantage = (now - old).exp(), batch[2][:, 0]
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()


def vae(batch: Any) -> Tensor:
    mean, log_var = enc(batch[0]).chunk(2, 1)
    kl = -0.5 * (1 + log_var - mean.square() - log_var.exp()).sum(1)
    return fn.mse_loss(net(batch[0]), batch[2], reduction="sum") / len(batch[0]) + kl.mean()


def mixture(batch: Any) -> Tensor:
    weights, each = deep(batch[0]).log_softmax(1), net(batch[0]) - batch[2]
    return -torch.logsumexp(weights - each.square(), 1).mean()


RIGHT: dict[str, Loss] = {
    "cross entropy": lambda b: fn.cross_entropy(deep(b[0]), b[1]),
    "label smoothing": lambda b: fn.cross_entropy(net(b[0]), b[1], label_smoothing=0.1),
    "soft labels": lambda b: fn.cross_entropy(net(b[0]), b[2].softmax(1)),
    "binary, weights of classes": lambda b: fn.binary_cross_entropy_with_logits(
        net(b[0]), (b[2] > 0).double(), pos_weight=pos_weight
    ),
    "half of mse": lambda b: fn.mse_loss(net(b[0]), b[2]) / 2,
    "huber": lambda b: fn.huber_loss(deep(b[0]), b[2]),
    "sum over len": lambda b: (net(b[0]) - b[2]).square().sum() / len(b[0]),
    "sum over numel": lambda b: (net(b[0]) - b[2]).abs().sum() / b[2].numel(),
    "focal": focal,
    "dice of each": dice,
    "distillation": lambda b: (
        4.0
        * fn.kl_div(
            fn.log_softmax(net(b[0]) / 2, 1),
            fn.softmax(teacher(b[0]) / 2, 1),
            reduction="batchmean",
        )
        + fn.cross_entropy(net(b[0]), b[1])
    ),
    "kl batchmean": lambda b: fn.kl_div(
        deep(b[0]).log_softmax(1), b[2].softmax(1), reduction="batchmean"
    ),
    "uncertainty weighting": lambda b: (
        (-log_sigma[0]).exp() * fn.mse_loss(net(b[0]), b[2])
        + (-log_sigma[1]).exp() * fn.cross_entropy(deep(b[0]), b[1])
        + log_sigma.sum()
    ),
    "gradient penalty": gradient_penalty,
    "r-drop": r_drop,
    "mixup": mixup,
    "dpo": dpo,
    "vector quantization": vq,
    "lm, all targets": lambda b: fn.cross_entropy(logits(b).flatten(0, 1), ids(b).flatten()),
    "lm, shifted": lambda b: fn.cross_entropy(
        logits(b)[:, :-1].reshape(-1, 11), ids(b)[:, 1:].reshape(-1)
    ),
    "mean over sequences": sequence_mean,
    "ctc": ctc,
    "triplets of each": triplet,
    "margin ranking": lambda b: fn.margin_ranking_loss(
        net(b[0])[:, 0], deep(b[0])[:, 0], b[2][:, 0].sign()
    ),
    "cosine embedding": lambda b: fn.cosine_embedding_loss(
        enc(b[0]), enc(b[0] + 1), b[2][:, 0].sign()
    ),
    "gaussian nll": lambda b: fn.gaussian_nll_loss(net(b[0]), b[2], deep(b[0]).exp()),
    "one by one": per_row,
    "unbound and stacked": unbound,
    "custom function": custom_function,
    "actor critic": actor_critic,
    "ppo": ppo,
    "vae": vae,
    "mixture": mixture,
    "convolution": lambda b: fn.cross_entropy(head(conv(b[0][:, None])), b[1]),
    "lstm": lambda b: fn.cross_entropy(lstm(tokens(b))[0][:, -1, :CLASSES], b[1]),
    "pooled transformer": lambda b: fn.mse_loss(block(tokens(b)).mean(1)[:, :3], b[2]),
    "masked pooling": lambda b: (
        ((block(tokens(b)) * b[3][..., None]).sum(1) / b[3].sum(1, keepdim=True)).square().mean()
    ),
    "masked mean over all": lambda b: (
        fn.cross_entropy(logits(b).mT, ids(b), reduction="none") * b[3]
    ).mean(),
    "weight decay": lambda b: (
        fn.mse_loss(net(b[0]), b[2]) + 1e-2 * net.weight.square().sum().sqrt()
    ),
    "centers": lambda b: (enc(b[0]) - centers[b[1]]).square().sum(1).mean(),
    "fixed prototypes": lambda b: fn.cross_entropy(enc(b[0]) @ prototypes.T / 0.1, b[1]),
    "learnt temperature": lambda b: fn.cross_entropy(
        fn.normalize(enc(b[0]), dim=1) @ fn.normalize(centers, dim=1).T / temperature, b[1]
    ),
    "picked log probabilities": lambda b: (
        -fn.log_softmax(net(b[0]), 1)[torch.arange(len(b[0])), b[1]].mean()
    ),
    "multi-sample": lambda b: torch.stack(
        [fn.cross_entropy(net(b[0] * (1 + at)), b[1]) for at in range(3)]
    ).mean(),
    "worst of each sample": lambda b: (net(b[0]) - b[2]).square().amax(1).mean(),
    "attention by einsum": lambda b: (
        torch.einsum("btd,bsd->bts", tokens(b), block(tokens(b))).softmax(-1).square().mean()
    ),
    "outer product of each": lambda b: (
        torch.einsum("ni,nj->nij", enc(b[0]), enc2(b[0])).square().mean()
    ),
    "einsum with weights": lambda b: torch.einsum("nd,kd->nk", enc(b[0]), centers).square().mean(),
    "siamese": lambda b: fn.pairwise_distance(enc(b[0]), enc2(b[0])).mean(),
    "two views in one pass": two_views,
    "hinge": lambda b: fn.relu(1 - deep(b[0]) * b[2].sign()).mean(),
    "log cosh": lambda b: (net(b[0]) - b[2]).cosh().log().mean(),
    "quantiles": lambda b: torch.maximum(
        0.3 * (b[2] - net(b[0])), -0.7 * (b[2] - net(b[0]))
    ).mean(),
    "barrier": lambda b: fn.mse_loss(net(b[0]), b[2]) + fn.softplus(net.bias).sum(),
    "per class mean": lambda b: ((net(b[0]) - b[2]).square().mean(0) * pos_weight).sum(),
    "in bits": lambda b: fn.cross_entropy(net(b[0]), b[1]) / torch.log(torch.tensor(2.0)),
    "time first": lambda b: (
        block_time_first(tokens(b).transpose(0, 1)).square().mean((0, 2)).mean()
    ),
}


def info_nce(batch: Any) -> Tensor:
    one, two = fn.normalize(enc(batch[0]), dim=1), fn.normalize(enc2(batch[0]), dim=1)
    return fn.cross_entropy(one @ two.T / 0.1, torch.arange(len(one)))


def nt_xent(batch: Any) -> Tensor:
    both = fn.normalize(torch.cat([enc(batch[0]), enc2(batch[0])]), dim=1)
    scores = (both @ both.T / 0.5).masked_fill(torch.eye(len(both)).bool(), -1e9)
    num = len(batch[0])
    return fn.cross_entropy(scores, torch.arange(2 * num).roll(num))


def barlow(batch: Any) -> Tensor:
    one, two = enc(batch[0]), enc2(batch[0])
    one, two = ((z - z.mean(0)) / (z.std(0) + 1e-5) for z in (one, two))
    c = one.T @ two / len(one)
    return (c - torch.eye(8)).square().mean()


def mmd(batch: Any) -> Tensor:
    one, two = enc(batch[0]), enc2(batch[0])
    return (one.mean(0) - two.mean(0)).square().sum()


def router(batch: Any) -> Tensor:
    probabilities = deep(batch[0]).softmax(1)
    used = fn.one_hot(probabilities.argmax(1), CLASSES).double().mean(0)
    return (
        fn.cross_entropy(net(batch[0]), batch[1])
        + 0.1 * CLASSES * (used * probabilities.mean(0)).sum()
    )


def mined_triplet(batch: Any) -> Tensor:
    z = enc(batch[0])
    far = torch.cdist(z, z)
    same = batch[1][:, None] == batch[1][None]
    hardest = far.masked_fill(~same, 0).amax(1) - far.masked_fill(same, 1e3).amin(1)
    return fn.relu(hardest + 1).mean()


def supcon(batch: Any) -> Tensor:
    z = fn.normalize(enc(batch[0]), dim=1)
    scores = torch.matmul(z, z.t()).log_softmax(1)
    same = (batch[1][:, None] == batch[1][None]).double()
    return -((scores * same).sum(1) / same.sum(1)).mean()


def masked(batch: Any) -> Tensor:
    return fn.cross_entropy(logits(batch).mT, ids(batch), reduction="none") * batch[3]


def by_its_scale(batch: Any) -> Tensor:
    each = (net(batch[0]) - batch[2]).square()
    return (each / each.detach().mean()).mean()


WRONG: dict[str, Loss] = {
    "sum": lambda b: fn.cross_entropy(net(b[0]), b[1], reduction="sum"),
    "sum by hand": lambda b: 0.5 * (net(b[0]) - b[2]).square().sum(),
    "sum of one term": lambda b: fn.mse_loss(net(b[0]), b[2]) + 1e-3 * enc(b[0]).square().sum(),
    "sum over a constant": lambda b: (net(b[0]) - b[2]).square().sum() / 7,
    "class weights": lambda b: fn.cross_entropy(net(b[0]), b[1], pos_weight),
    "smoothed class weights": lambda b: fn.cross_entropy(
        net(b[0]), b[1], pos_weight, label_smoothing=0.1
    ),
    "ignored labels": lambda b: fn.cross_entropy(logits(b).mT, labels(b)),
    "masked mean": lambda b: masked(b).sum() / b[3].sum(),
    "masked mean of means": lambda b: masked(b).mean() / b[3].double().mean(),
    "masked mean, clamped": lambda b: masked(b).sum() / b[3].sum().clamp(min=1),
    "masked mean by item": lambda b: masked(b).sum() / b[3].sum().item(),
    "selected": lambda b: masked(b)[b[3]].mean(),
    "selected by masked_select": lambda b: masked(b).masked_select(b[3]).mean(),
    "weighted mean": lambda b: (
        ((net(b[0]) - b[2]).square().mean(1) * b[2][:, 0].exp()).sum() / b[2][:, 0].exp().sum()
    ),
    "weights of mean one": lambda b: (
        (net(b[0]) - b[2]).square().mean(1) / b[2][:, 0].exp().mean() * b[2][:, 0].exp()
    ).mean(),
    "info nce": info_nce,
    "symmetric info nce": lambda b: (info_nce(b) + info_nce((b[0].flip(1), *b[1:]))) / 2,
    "against detached": lambda b: fn.cross_entropy(
        enc(b[0]) @ enc2(b[0]).detach().T, torch.arange(len(b[0]))
    ),
    "nt-xent": nt_xent,
    "supervised contrastive": supcon,
    "by einsum": lambda b: fn.cross_entropy(
        torch.einsum("id,jd->ij", enc(b[0]), enc2(b[0])), torch.arange(len(b[0]))
    ),
    "by broadcasting": lambda b: (enc(b[0])[:, None] - enc(b[0])[None]).square().sum(-1).mean(),
    "by cdist": lambda b: torch.cdist(enc(b[0]), enc2(b[0])).exp().neg().mean(),
    "by pdist": lambda b: fn.pdist(enc(b[0])).pow(2).mul(-2).exp().mean().log(),
    "wrong shapes": lambda b: (net(b[0])[:, 0] - b[2][:, :1]).square().mean(),
    "hard triplets": mined_triplet,
    "rolled negatives": lambda b: fn.triplet_margin_loss(
        enc(b[0]), enc2(b[0]), enc2(b[0]).roll(1, 0)
    ),
    "shuffled negatives": lambda b: fn.triplet_margin_loss(
        enc(b[0]), enc2(b[0]), enc2(b[0])[torch.arange(len(b[0])).flip(0)]
    ),
    "barlow twins": barlow,
    "covariance": lambda b: torch.cov(enc(b[0]).T).square().mean(),
    "variance": lambda b: fn.relu(1 - enc(b[0]).var(0).sqrt()).mean(),
    "moments": mmd,
    "style of the batch": lambda b: (enc(b[0]).T @ enc(b[0]) / len(b[0])).square().mean(),
    "batch dice": batch_dice,
    "rmse": lambda b: fn.mse_loss(net(b[0]), b[2]).sqrt(),
    "psnr": lambda b: 10 * torch.log10(fn.mse_loss(net(b[0]), b[2])),
    "log of mean": lambda b: net(b[0]).exp().mean().log(),
    "norm": lambda b: (net(b[0]) - b[2]).norm() / len(b[0]),
    "r squared": lambda b: (net(b[0]) - b[2]).square().sum() / (b[2] - b[2].mean(0)).square().sum(),
    "pearson": lambda b: (
        1
        - fn.cosine_similarity(
            net(b[0])[:, 0] - net(b[0])[:, 0].mean(), b[2][:, 0] - b[2][:, 0].mean(), dim=0
        )
    ),
    "max": lambda b: (net(b[0]) - b[2]).square().sum(1).max(),
    "hardest half": lambda b: (
        fn.cross_entropy(net(b[0]), b[1], reduction="none").topk(len(b[0]) // 2).values.mean()
    ),
    "sorted": lambda b: (net(b[0])[:, 0].sort().values - b[2][:, 0].sort().values).abs().mean(),
    "median": lambda b: (net(b[0]) - b[2]).square().mean(1).median(),
    "trimmed": lambda b: (net(b[0]) - b[2]).square().mean(1).sort().values[:-1].mean(),
    "log-sum-exp": lambda b: torch.logsumexp((net(b[0]) - b[2]).square().sum(1), 0),
    "softmax over the batch": lambda b: (net(b[0])[:, 0].softmax(0) * b[2][:, 0]).sum(),
    "router": router,
    "entropy of the mean": lambda b: (
        -(net(b[0]).softmax(1).mean(0) * net(b[0]).softmax(1).mean(0).log()).sum()
    ),
    "flooding": lambda b: (fn.cross_entropy(net(b[0]), b[1]) - 1.2).abs() + 1.2,
    "product of means": lambda b: fn.mse_loss(net(b[0]), b[2]) * fn.cross_entropy(deep(b[0]), b[1]),
    "ratio of means": lambda b: fn.mse_loss(net(b[0]), b[2]) / fn.mse_loss(deep(b[0]), b[2]),
    "normalized by its own scale": by_its_scale,
    "centred": lambda b: (enc(b[0]) - enc(b[0]).mean(0)).square().mean(),
    "first sample": lambda b: (net(b[0])[0] - b[2][0]).square().mean(),
    "half of the samples": lambda b: fn.mse_loss(
        net(b[0])[: len(b[0]) // 2], b[2][: len(b[0]) // 2]
    ),
    "positives alone": lambda b: -net(b[0])[:, 0][b[2][:, 0] > 0].mean(),
    "cumulated": lambda b: net(b[0]).cumsum(0).square().mean(),
    "largest of two means": lambda b: torch.maximum(
        fn.mse_loss(net(b[0]), b[2]), fn.l1_loss(net(b[0]), b[2])
    ),
    "attention over the batch": lambda b: block_time_first(tokens(b)).exp().mean(),
}
