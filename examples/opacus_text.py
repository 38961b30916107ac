"""Short texts told apart by a transformer block, and Adam.

Written for Opacus in the spirit of its text examples. With `from opacus import PrivacyEngine` it runs there. The texts are
made up here: opinions on things, for and against. Each is cut or padded to one public length, whatever the batch.
"""

import argparse
import random

import torch
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader

from tptopk.integrations.opacus import PrivacyEngine

THINGS = ["film", "book", "meal", "hotel", "song", "play", "garden", "train", "museum", "lesson"]
FOR = ["wonderful", "charming", "clever", "warm", "lovely", "bright", "generous", "delightful"]
AGAINST = ["dull", "clumsy", "cold", "tedious", "noisy", "stale", "careless", "dreadful"]
AROUND = [
    "the",
    "a",
    "we",
    "found",
    "thought",
    "it",
    "was",
    "and",
    "quite",
    "rather",
    "very",
    "that",
    "evening",
    "again",
    "with",
    "friends",
    "in",
    "town",
    "last",
    "week",
]
WORDS = ["<pad>", *THINGS, *FOR, *AGAINST, *AROUND]
LENGTH = 12


def opinions(count, seed):
    """(ids [LENGTH], label) for each text."""
    chance = random.Random(seed)
    found = []
    for _ in range(count):
        label = chance.randrange(2)
        text = chance.choices(AROUND, k=chance.randint(4, 9)) + chance.choices(THINGS, k=1)
        text += chance.choices(FOR if label else AGAINST, k=2)
        chance.shuffle(text)
        ids = [WORDS.index(word) for word in text][:LENGTH]
        found.append((torch.tensor(ids + [0] * (LENGTH - len(ids))), torch.tensor(label)))
    return found


class SampleTransformer(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(len(WORDS), width), nn.Embedding(LENGTH, width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.grow, self.shrink = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, 2)

    def forward(self, ids):  # [B, T]
        places = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
        x = self.tokens(ids) + self.positions(places)  # [B, T, D]
        q, k, v = self.query_key_value(self.norm1(x)).chunk(3, -1)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v))
        x = x + self.shrink(F.gelu(self.grow(self.norm2(x))))
        return self.head(x.mean(1))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--epsilon", type=float, default=6.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    parser.add_argument("--max-per-sample-grad-norm", type=float, default=1.0)
    args = parser.parse_args()

    torch.manual_seed(0)
    train_loader = DataLoader(opinions(1000, seed=0), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(opinions(400, seed=1), batch_size=200)

    model = SampleTransformer()
    optimizer = optim.Adam(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        target_epsilon=args.epsilon,
        target_delta=args.delta,
        epochs=args.epochs,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    criterion = nn.CrossEntropyLoss()
    for epoch in range(1, args.epochs + 1):
        model.train()
        for ids, target in train_loader:
            loss = criterion(model(ids), target)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: ε = {privacy_engine.get_epsilon(args.delta):.2f} at δ = {args.delta}")

    model.eval()
    with torch.no_grad():
        right = sum((model(ids).argmax(1) == target).sum().item() for ids, target in test_loader)
    print(f"test accuracy {right / 400:.3f}")


if __name__ == "__main__":
    main()
