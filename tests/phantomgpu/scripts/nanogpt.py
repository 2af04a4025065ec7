"""A GPT in the style of nanoGPT: `nanogpt.py SIZE [--compile]`."""

import sys, math, torch, inspect
from torch import nn
from torch.nn import functional as F

B, compile = int(sys.argv[1]), "--compile" in sys.argv
C, H, T, L, V = 384, 6, 256, 4, 50304


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.c_attn, self.c_proj = nn.Linear(C, 3 * C), nn.Linear(C, C)
        self.mlp = nn.Sequential(
            nn.Linear(C, 4 * C), nn.GELU(), nn.Linear(4 * C, C), nn.Dropout(0.1)
        )

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (
            y.view(b, t, H, C // H).transpose(1, 2) for y in self.c_attn(self.ln_1(x)).split(C, 2)
        )
        y = F.scaled_dot_product_attention(
            q, k, v, dropout_p=0.1 if self.training else 0, is_causal=True
        )
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(b, t, C))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe, self.h, self.ln = (
            nn.Embedding(V, C),
            nn.Embedding(T, C),
            nn.ModuleList(Block() for _ in range(L)),
            nn.LayerNorm(C),
        )
        self.head = nn.Linear(C, V, bias=False)
        self.wte.weight = self.head.weight

    def forward(self, idx, targets):
        x = self.wte(idx) + self.wpe(torch.arange(idx.size(1), device=idx.device))
        for b in self.h:
            x = b(x)
        logits = self.head(self.ln(x))
        return logits, F.cross_entropy(logits.view(-1, V), targets.view(-1), ignore_index=-1)


torch.backends.cuda.matmul.allow_tf32 = True
torch.backends.cudnn.allow_tf32 = True
ctx = torch.amp.autocast("cuda", torch.bfloat16)
model = GPT().to("cuda")
scaler = torch.amp.GradScaler("cuda", enabled=False)
opt = torch.optim.AdamW(model.parameters(), fused=True)
if compile:
    model = torch.compile(model)


def get():
    x = torch.randint(0, V, (B, T + 1))
    return x[:, :-1].pin_memory().to("cuda", non_blocking=True), x[:, 1:].pin_memory().to(
        "cuda", non_blocking=True
    )


@torch.no_grad()
def estimate():
    model.eval()
    out = torch.zeros(5)
    for k in range(5):
        with ctx:
            _, l = model(*get())
        out[k] = l.item()
    model.train()
    return out.mean()


X, Y = get()
for it in range(20):
    if it % 5 == 0:
        print("eval", estimate())
    for micro in range(2):
        with ctx:
            _, loss = model(X, Y)
            loss = loss / 2
        X, Y = get()
        scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    print(it, loss.item())
