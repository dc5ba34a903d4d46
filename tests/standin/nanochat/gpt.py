"""A small transformer with the parts of the newest model: smear, backout, gated value embeddings, quarter windows."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from nanochat.common import COMPUTE_DTYPE

GATE, SMEAR, CAP, BASE = 12, 24, 15.0, 100_000.0


@dataclass
class GPTConfig:
    sequence_len: int = 64
    vocab_size: int = 320
    n_layer: int = 2
    n_head: int = 1
    n_kv_head: int = 1
    n_embd: int = 128
    window_pattern: str = "SSSL"


def rms(x):
    return F.rms_norm(x, (x.shape[-1],))


class Cast(nn.Linear):
    """Computes in the type of its input, whatever the type of its weights."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def linear(columns, rows):
    return Cast(columns, rows, bias=False)


def has_values(config, layer):
    return (config.n_layer - 1 - layer) % 2 == 0


class Attention(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.config = config
        width, head = config.n_embd, config.n_embd // config.n_head
        self.c_q, self.c_proj = linear(width, width), linear(width, width)
        self.c_k, self.c_v = (linear(width, config.n_kv_head * head) for _ in range(2))
        self.ve_gate = linear(GATE, config.n_kv_head) if has_values(config, layer) else None

    def forward(self, x, values, turn, mask):
        rows, time, _ = x.shape
        q, k, v = (f(x).view(rows, time, -1, self.config.n_embd // self.config.n_head) for f in (self.c_q, self.c_k,
                                                                                               self.c_v))  # fmt: skip
        if values is not None:
            gate = 3.0 * torch.sigmoid(self.ve_gate(x[..., :GATE]))  # (rows, time, heads)
            v = v + gate[..., None] * values.view_as(v)
        q, k = (1.2 * rms(turned(t, *turn)) for t in (q, k))
        y = F.scaled_dot_product_attention(*(t.transpose(1, 2) for t in (q, k, v)), attn_mask=mask)
        return self.c_proj(y.transpose(1, 2).reshape(rows, time, -1))


def turned(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos + b * sin, b * cos - a * sin), dim=-1)


class MLP(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.c_fc, self.c_proj = linear(width, 4 * width), linear(4 * width, width)

    def forward(self, x):
        return self.c_proj(F.relu(self.c_fc(x)) ** 2)


class Block(nn.Module):
    def __init__(self, config, layer):
        super().__init__()
        self.attn, self.mlp = Attention(config, layer), MLP(config.n_embd)

    def forward(self, x, values, turn, mask):
        x = x + self.attn(rms(x), values, turn, mask)
        return x + self.mlp(rms(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        padded, width = -(-config.vocab_size // 64) * 64, config.n_embd
        blocks = nn.ModuleList([Block(config, i) for i in range(config.n_layer)])
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(padded, width), "h": blocks})
        self.lm_head, self.smear_gate = linear(width, padded), linear(SMEAR, 1)
        self.resid_lambdas, self.x0_lambdas = (nn.Parameter(torch.ones(config.n_layer)) for _ in range(2))
        self.smear_lambda, self.backout_lambda = (nn.Parameter(torch.zeros(1)) for _ in range(2))
        kv = width // config.n_head * config.n_kv_head
        tables = {str(i): nn.Embedding(padded, kv) for i in range(config.n_layer) if has_values(config, i)}
        self.value_embeds = nn.ModuleDict(tables)
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(0), persistent=False)

    @torch.no_grad()
    def init_weights(self):
        bound = (3.0 / self.config.n_embd) ** 0.5
        for name, p in self.named_parameters():
            if name.endswith("c_proj.weight") or name == "smear_lambda":
                p.zero_()
            elif p.ndim == 2:
                p.uniform_(-bound, bound)
        nn.init.normal_(self.transformer["wte"].weight, std=0.8)
        nn.init.normal_(self.lm_head.weight, std=0.001)
        self.resid_lambdas.fill_(1.1)
        self.x0_lambdas.fill_(0.1)
        self.backout_lambda.fill_(0.2)
        half = self.config.n_embd // self.config.n_head // 2
        angles = torch.outer(torch.arange(10.0 * self.config.sequence_len), BASE ** (-torch.arange(half) / half))
        where = self.lm_head.weight.device
        self.cos, self.sin = (f(angles)[:, None].to(where, COMPUTE_DTYPE) for f in (torch.cos, torch.sin))
        self.transformer["wte"].to(COMPUTE_DTYPE)

    def setup_optimizer(self, unembedding_lr=0.004, embedding_lr=0.2, matrix_lr=0.02, scalar_lr=0.5):
        print("a line that no command may show")
        scale = (self.config.n_embd / 768) ** -0.5
        smear = [self.smear_gate.weight, self.smear_lambda, self.backout_lambda]
        adam = ((self.lm_head.parameters(), unembedding_lr * scale),
                (self.transformer["wte"].parameters(), embedding_lr * scale),
                (self.value_embeds.parameters(), embedding_lr * scale / 2),
                ([self.resid_lambdas], scalar_lr / 100), ([self.x0_lambdas], scalar_lr), (smear, 0.2))  # fmt: skip
        groups = [{"kind": "adamw", "params": list(params), "lr": lr} for params, lr in adam]
        groups.append({"kind": "muon", "params": list(self.transformer["h"].parameters()), "lr": matrix_lr})
        return torch.optim.SGD(groups)

    def get_device(self):
        return self.lm_head.weight.device

    def forward(self, idx, targets=None, kv_cache=None, loss_reduction="mean"):
        time = idx.shape[1]
        assert time > 1, "a row has at least two tokens"
        assert self.cos.dtype == COMPUTE_DTYPE, "the tables of angles keep their type"
        turn = self.cos[:time], self.sin[:time]
        x = rms(self.transformer["wte"](idx).to(COMPUTE_DTYPE))
        gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR]))
        x0 = x = torch.cat((x[:, :1], x[:, 1:] + gate * x[:, :-1]), dim=1)
        ages = torch.arange(time, device=idx.device)[:, None] - torch.arange(time, device=idx.device)
        middle = x
        for i, block in enumerate(self.transformer["h"]):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            values = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None
            x = block(x, values, turn, (ages >= 0) & (ages <= self._window(i)))
            if i == self.config.n_layer // 2:
                middle = x
        x = rms(x - self.backout_lambda.to(x.dtype) * middle)
        logits = CAP * torch.tanh(self.lm_head(x)[..., : self.config.vocab_size].float() / CAP)
        if targets is None:
            return logits
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1), ignore_index=-1,
                               reduction=loss_reduction)  # fmt: skip

    def _window(self, layer):
        pattern = self.config.window_pattern
        is_long = layer == self.config.n_layer - 1 or pattern[layer % len(pattern)] == "L"
        return self.config.sequence_len if is_long else self.config.sequence_len // 4
