"""The model of recovery.json in PyTorch, for the peers of the recovery and goodput benches: 8.43 M parameters."""
import torch, torch.nn as nn, torch.nn.functional as F

WIDTH, HEADS, LAYERS, FF, VOCAB, SEQ, GLOBAL = 256, 8, 8, 688, 4096, 64, 12


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv, self.o = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, FF, bias=False), nn.Linear(WIDTH, FF, bias=False)
        self.down = nn.Linear(FF, WIDTH, bias=False)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, WIDTH)
        x = x + self.o(y)
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def model():
    return nn.Sequential(nn.Embedding(VOCAB, WIDTH), *[Block() for _ in range(LAYERS)], nn.RMSNorm(WIDTH),
                         nn.Linear(WIDTH, VOCAB, bias=False))


def loss(model, sequences, seed):
    """The mean loss of random sequences."""
    torch.manual_seed(seed)
    x = torch.randint(VOCAB, (sequences, SEQ + 1))
    return F.cross_entropy(model(x[:, :-1]).reshape(-1, VOCAB), x[:, 1:].reshape(-1))
