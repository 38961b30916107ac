"""A small convolutional network on handwritten digits: scikit-learn's, 8 × 8 pixels, stand in for MNIST.

Written for Opacus in the spirit of its MNIST example. With `from opacus import PrivacyEngine` it runs there.
"""

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from tptopk.integrations.opacus import PrivacyEngine


class SampleConvNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3)
        self.fc1 = nn.Linear(32, 32)
        self.fc2 = nn.Linear(32, 10)

    def forward(self, x):  # [B, 1, 8, 8]
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)  # [B, 16, 4, 4]
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)  # [B, 32, 1, 1]
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


def train(model, train_loader, optimizer, epoch, privacy_engine, delta):
    model.train()
    criterion = nn.CrossEntropyLoss()
    for data, target in train_loader:
        optimizer.zero_grad()
        loss = criterion(model(data), target)
        loss.backward()
        optimizer.step()
    print(f"epoch {epoch}: ε = {privacy_engine.get_epsilon(delta):.2f} at δ = {delta}")


def test(model, test_loader):
    model.eval()
    correct = total = 0
    with torch.no_grad():
        for data, target in test_loader:
            correct += (model(data).argmax(1) == target).sum().item()
            total += len(target)
    return correct / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--lr", type=float, default=2.0)
    parser.add_argument("--sigma", type=float, default=1.1)
    parser.add_argument("--max-per-sample-grad-norm", type=float, default=1.0)
    parser.add_argument("--delta", type=float, default=1e-4)
    args = parser.parse_args()

    torch.manual_seed(0)
    images, labels = load_digits(return_X_y=True)
    images = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
    labels = torch.tensor(labels)
    train_loader = DataLoader(TensorDataset(images[:1437], labels[:1437]), batch_size=args.batch_size, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1437:], labels[1437:]), batch_size=256)

    model = SampleConvNet()
    optimizer = optim.SGD(model.parameters(), lr=args.lr)
    privacy_engine = PrivacyEngine()
    model, optimizer, train_loader = privacy_engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=train_loader,
        noise_multiplier=args.sigma,
        max_grad_norm=args.max_per_sample_grad_norm,
    )
    for epoch in range(1, args.epochs + 1):
        train(model, train_loader, optimizer, epoch, privacy_engine, args.delta)
    print(f"test accuracy {test(model, test_loader):.3f}")


if __name__ == "__main__":
    main()
